"""What of a run is kept, and how its shards are put together."""

from __future__ import annotations

import dataclasses

from tunix_core.validation import require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """Trajectories, step records and evaluations are kept for ever; weights can be let go, shards become fewer files.

    Whatever the numbers say, nothing goes that a pointer, a retained checkpoint (with the step records and shards after
    it) or a reader's lease refers to.
    """

    interval_seconds: float = 60.0
    """Between two looks at what can go."""
    keep_policies: int = 0
    """Newest published versions that stay, beside version 0 and what is referred to; 0: all."""
    keep_snapshots: int = 0
    """Newest snapshots that stay, beside those not judged yet; 0: all."""
    compact: bool = True
    """Put the shards of an hour that is over into few files, and delete them after `grace_seconds`."""
    target_file_bytes: int = 64 * 2**20
    """Of the shards that make one file."""
    grace_seconds: float = 3600.0
    """Between retiring an object and deleting it: longer than any read without a lease."""

    def __post_init__(self) -> None:
        require_range("retention.interval_seconds", self.interval_seconds, 0.05)
        require_range("retention.keep_policies", self.keep_policies, 0)
        require_range("retention.keep_snapshots", self.keep_snapshots, 0)
        require_range("retention.target_file_bytes", self.target_file_bytes, 2**10, 2**30)
        require_range("retention.grace_seconds", self.grace_seconds, 0)
