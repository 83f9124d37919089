"""What is simulated: the pool, the learner, what surrounds them, and the rule that paces them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from tunix_core.validation import require, require_choice, require_range

Strategy = Literal["headroom", "fixed", "unpaced", "synchronous"]
Order = Literal["oldest_first", "freshest_first", "largest_advantage_first", "first_in_first_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, at random times with these means. 0 seconds between two of a kind: never."""

    seconds_between_deaths: float = 0.0
    """Of any one actor of the pool. What it has under way is lost."""
    restart_seconds: float = 20.0
    """Until another life of a dead actor announces itself."""
    detection_seconds: float = 10.0
    """A dead actor keeps its rank, and its share, for so long."""
    seconds_between_spikes: float = 0.0
    """… after which every episode that starts takes `spike_factor` times as long, for `spike_seconds`."""
    spike_seconds: float = 60.0
    spike_factor: float = 4.0
    seconds_between_outages: float = 0.0
    """… after which nothing is published for `outage_seconds`."""
    outage_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_range(f"faults.{field.name}", getattr(self, field.name), 0, 1e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One pool, one learner. The defaults are those of the control study in the design."""

    num_actors: int = 64
    groups_per_actor: int = 8
    """What an actor's slots hold at once."""
    group_size: int = 8
    episode_seconds: float = 4.0
    """Mean of a lognormal distribution; a group takes as long as the slowest of its episodes."""
    sigma: float = 1.0
    """Of the logarithm of an episode's seconds."""
    episode_limit_seconds: float = math.inf
    """Episodes end here at the latest."""
    groups_per_batch: int = 160
    step_seconds: float = 10.0
    prefetch: bool = True
    """The learner chooses the next batch while it steps, as the real one does; else when a step ends."""
    max_staleness: int = 4
    max_mean_staleness: float = math.inf
    max_throttle_seconds: float = 30.0
    snapshot_interval_steps: int = 1
    refused_in_a_row: int = 0
    """Snapshots that the gate refuses after each one that it lets through."""
    publish_seconds: float = 1.0
    """From the end of a step to actors that run its weights."""
    flush_seconds: float = 2.0
    """A finished group waits for its shard up to so long, evenly."""
    store_seconds: float = 0.0
    """Mean of an exponential delay between a shard's end and its being readable."""
    reader_poll_seconds: float = 0.25
    control_interval_seconds: float = 1.0
    control_delay_seconds: float = 1.0
    strategy: Strategy = "headroom"
    """`headroom`: DESIGN section 6. `fixed`: a constant `target`. `unpaced`: actors never stop. `synchronous`: a batch is
    rolled out with the newest weights while the learner waits, and stepped on."""
    target: int = 4
    """Of `fixed`: batches of headroom."""
    count_step: bool = True
    """Of `fixed`: the running step's groups use up capacity."""
    order: Order = "oldest_first"
    """The product's (groups' advantages are then drawn, evenly), or a published rule."""
    max_reuse: int = 1
    """Steps that may train on a group, each within the bound."""
    measure_spare: bool = True
    """Tell the target controller how much was queued; else it goes by trial."""
    faults: Faults = Faults()
    duration_seconds: float = 1500.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_actors", "groups_per_actor", "group_size", "groups_per_batch", "snapshot_interval_steps"):
            require_range(field, getattr(self, field), 1)
        for field in ("episode_seconds", "step_seconds", "episode_limit_seconds", "duration_seconds"):
            require_range(field, getattr(self, field), 1e-6)
        for field in ("reader_poll_seconds", "control_interval_seconds"):
            require_range(field, getattr(self, field), 0.01, 3600)
        for field in (
            "max_mean_staleness",
            "max_throttle_seconds",
            "publish_seconds",
            "flush_seconds",
            "store_seconds",
        ):
            require_range(field, getattr(self, field), 0)
        for field in ("max_staleness", "refused_in_a_row", "target", "control_delay_seconds", "seed"):
            require_range(field, getattr(self, field), 0)
        require_range("sigma", self.sigma, 0, 4)
        require_choice("strategy", self.strategy, Strategy)
        require_choice("order", self.order, Order)
        uses = 1 if self.order == "first_in_first_out" else self.bound + 1
        require(
            1 <= self.max_reuse <= uses,
            "max_reuse",
            self.max_reuse,
            f"1 to {uses} (max_staleness + 1; 1 where the strategy is synchronous or the order first_in_first_out)",
            "A further use would be over the bound, or is not part of the rule.",
        )
        longest = max(1, self.max_staleness)
        require(
            self.snapshot_interval_steps <= longest or self.strategy in ("fixed", "unpaced"),
            "snapshot_interval_steps",
            self.snapshot_interval_steps,
            f"1 to {longest} (max(1, max_staleness))",
            "With a longer interval everything is over the bound before newer weights exist.",
        )

    @property
    def bound(self) -> int:
        """Staleness that a step accepts."""
        return 0 if self.strategy == "synchronous" else self.max_staleness
