"""What of a run can go: old policies and snapshots, and the shards of hours that were compacted.

Everything is decided by reference. `Pins` collects what the run still needs to go on from any checkpoint that exists;
leases hold what somebody reads; the rules of `RetentionConfig` choose among the rest.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectMissing
from tunix_core.retention_config import RetentionConfig
from tunix_core.storage import compaction, multifile, retirement
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore, from_json
from tunix_core.storage.writers import read_writers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pins:
    """The shards that the run needs where its actors wrote them."""

    whole: Literal["everything", "nothing", ""] = ""
    """Everything where there is no checkpoint yet: a learner would begin with the first shard. Nothing of a run that has
    its report: it goes on no more."""
    shards: frozenset[str] = frozenset()
    """Named by a step record or a buffer that a learner may go on from."""
    next_sequences: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Incarnation -> its first shard that some checkpoint's reader has not read; others are unread as a whole."""

    def holds(self, shard: str) -> bool:
        if self.whole or shard in self.shards:
            return self.whole != "nothing"
        name = paths.parse_shard(shard)
        return name.sequence >= self.next_sequences.get(name.incarnation, 0)


_ALL_READ = 2**62


def read_pins(store: ObjectStore) -> Pins:
    """Over all checkpoints that exist, retired ones included as long as they can be read.

    Raises:
        CorruptObject: a checkpoint's manifest is none; nothing may be deleted.
    """
    if store.exists(paths.REPORTS + "summary.json"):
        return Pins(whole="nothing")
    checkpoints = CheckpointStore(store)
    clocks = checkpoints.clocks()
    if not clocks:
        return Pins(whole="everything")
    clocks = sorted({*clocks, *checkpoints.retired()})
    shards: set[str] = set()
    found: list[Mapping[str, Any]] = []
    for clock in clocks:
        try:
            found += _feeds(store, checkpoints.manifest(clock))
        except ObjectMissing:
            continue  # being deleted
    cursors = [(feed["cursors"] or {"cursors": {}})["cursors"] for feed in found]
    lowest = {
        incarnation: min(_next_sequence(own.get(incarnation)) for own in cursors)
        for incarnation in set().union(*cursors)
    }
    for feed in found:
        shards.update(str(group["shard"]) for group in feed["groups"])
        shards.update(str(shard) for shard, _ in feed["replayed"])
    for record in read_steps(store, clocks[0]):
        shards.update(str(group["shard"]) for group in record["groups"])
    return Pins(shards=frozenset(shards), next_sequences=lowest)


def _next_sequence(cursor: Mapping[str, Any] | None) -> int:
    if cursor is None:
        return 0
    return _ALL_READ if cursor["closed"] else int(cursor["next_sequence"])


def _feeds(store: ObjectStore, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of the buffers in a checkpoint."""
    try:
        names = [f"host-{host:05d}/buffer.json" for host in manifest["metadata"]["feeds"]]
    except (KeyError, TypeError) as error:
        raise CorruptObject(f"checkpoint {manifest.get('clock')}: its manifest names no feeds ({error!r})") from error
    return [from_json(name, multifile.read_file(store, manifest, name)) for name in names]


class Retention:
    """One `tend` after another."""

    def __init__(
        self, store: ObjectStore, config: RetentionConfig, *, owner: str, clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            owner: the process, part of the names of files it writes.
            clock: seconds since the epoch.
        """
        self._store = store
        self._config = config
        self._owner = owner
        self._clock = clock
        self._done: set[str] = set()
        """Compacted hours whose shards are gone."""
        self.num_deleted_policies = 0
        self.num_deleted_snapshots = 0
        self.num_compacted_hours = 0
        self.num_deleted_shards = 0
        self.broken: dict[str, str] = {}
        """Compacted hours with a file that is not what it should be; their shards stay."""

    def tend(self) -> None:
        """Compact, retire and delete what can be.

        Raises:
            StoreError: try again.
        """
        self._tend_policies()
        self._tend_snapshots()
        if self._config.compact:
            self.compact()

    def _tend_policies(self) -> None:
        if not self._config.keep_policies:
            return
        policies = PolicyStore(self._store)
        current = policies.current()
        if current is None:
            return
        versions = policies.versions()
        kept = {0, current.version, *versions[-self._config.keep_policies :]}
        kept |= {version for version in versions if version > current.version}
        self.num_deleted_policies += self._let_go(paths.POLICIES, paths.policy, versions, kept)

    def _tend_snapshots(self) -> None:
        if not self._config.keep_snapshots:
            return
        current = PolicyStore(self._store).current()
        versions = SnapshotStore(self._store).versions()
        kept = {*versions[-self._config.keep_snapshots :]}
        kept |= {version for version in versions if current is None or version >= current.version}
        self.num_deleted_snapshots += self._let_go(paths.SNAPSHOTS, paths.snapshot, versions, kept)

    def _let_go(self, prefix: str, folder: Callable[[int], str], versions: Sequence[int], kept: Collection[int]) -> int:
        for version in versions:
            if version not in kept:
                retirement.retire(self._store, folder(version), reason="older than those kept", clock=self._clock)
        deleted = retirement.delete_retired(
            self._store,
            prefix,
            grace_seconds=self._config.grace_seconds,
            protected={folder(version) for version in kept},
            clock=self._clock,
        )
        return len(deleted)

    def compactable(self) -> dict[str, str]:
        """Hours with shards that are not compacted -> why not now; empty text: they can be."""
        listed = self._store.list_after(paths.TRAJECTORIES)
        hours: dict[str, list[str]] = collections.defaultdict(list)
        for key in filter(paths.is_shard, listed):
            hours[paths.parse_shard(key).hour].append(key)
        done = set(self._compacted_hours())
        writers = read_writers(self._store)
        pins: Pins | None = None
        found: dict[str, str] = {}
        for hour, keys in sorted(hours.items()):
            if hour in done:
                continue
            if not compaction.is_sealed(hour, writers, now=self._clock()):
                found[hour] = "not sealed: a writer may still add to it"
                continue
            pins = pins or read_pins(self._store)
            pinned = [key for key in keys if pins.holds(key)]
            found[hour] = f"pinned: a learner may go on from {pinned[0]}" if pinned else ""
        return found

    def _compacted_hours(self) -> list[str]:
        suffix = "/" + paths.MANIFEST
        keys = self._store.list_after(paths.COMPACTED)
        return [key.removeprefix(paths.COMPACTED).removesuffix(suffix) for key in keys if key.endswith(suffix)]

    def compact(self, log: Callable[[str], None] = lambda _: None) -> None:
        """Put the shards of all hours that can be into files, and delete those whose grace is over.

        Args:
            log: takes a line for each hour where something was done.
        """
        for hour, why_not in self.compactable().items():
            if not why_not:
                found = compaction.compact(
                    self._store, hour, owner=self._owner, target_file_bytes=self._config.target_file_bytes
                )
                self.num_compacted_hours += 1
                log(f"{hour}: {len(found.shards)} shards in {len(found.files)} files")
        for hour in self._compacted_hours():
            if hour not in self._done:
                before = self.num_deleted_shards
                self._let_sources_go(hour)
                if self.num_deleted_shards > before:
                    log(f"{hour}: {self.num_deleted_shards - before} shards deleted")

    def _let_sources_go(self, hour: str) -> None:
        compaction.retire_sources(self._store, hour, clock=self._clock)
        try:
            deleted = compaction.delete_sources(
                self._store,
                hour,
                grace_seconds=self._config.grace_seconds,
                pins=lambda: read_pins(self._store).holds,
                clock=self._clock,
            )
        except CorruptObject as error:
            self.broken[hour] = str(error)
            return
        self.broken.pop(hour, None)
        if deleted is not None:
            self._done.add(hour)
            self.num_deleted_shards += len(deleted)

    def progress(self) -> dict[str, Any]:
        """For the heartbeat."""
        return {
            "num_deleted_policies": self.num_deleted_policies,
            "num_deleted_snapshots": self.num_deleted_snapshots,
            "num_compacted_hours": self.num_compacted_hours,
            "num_deleted_shards": self.num_deleted_shards,
            "broken_hours": dict(self.broken),
        }
