"""The learner as several processes ("hosts"): how they find each other, what each feeds, how they agree.

A host's devices hold some of the parts that a batch's windows are split into. Hosts that hold the same parts
(`tensor` or `stage` reaches over hosts) form one feed; its first host reads the feed's shards. Decisions that all must
take alike go through `Hosts.lead`: each hands in what it knows, host 0 decides, all get the answer. That runs over the
key-value store of JAX's coordination service and launches nothing on a device, so any thread may use it: two
threads that launch collectives in another order on another host would wait for each other for ever.

A host that dies is noticed by the collective that it is missing in, or by the coordination service. Either way the others
leave with an exit code that is worth a retry, and start together again. Where host 0 dies, the service dies with it, and JAX's
client ends the process by SIGABRT as soon as its connection breaks (measured: 1.4 to 1.6 s after `kill -9`, on jax 0.10.2),
before any call of ours fails. That cannot be helped from here: the client's answer to an error is C++ that logs
and aborts; `jax.distributed.initialize` lets nobody replace it, and the callback in Python that the function below takes
(`missed_heartbeat_callback`) ends in `std::bad_cast`, since the status it is called with has no form in Python (jax 0.10.2 and
0.12.0). So SIGABRT is among the codes that are worth a retry.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from tunix_core.distributed.parallel import WINDOW_AXES
from tunix_core.errors import ConfigError, PeerLost
from tunix_core.meeting import meeting_of
from tunix_core.mesh_config import AXES

_JOIN_SECONDS = 300
_LOOK_AGAIN_SECONDS = 1.0

_Answer = TypeVar("_Answer")


# ---- which part ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one host feeds of every batch."""

    num_shards: int
    """Parts that a batch's windows are split into over the whole mesh; window i goes to part i mod that."""
    own: tuple[int, ...]
    """Those that this host's devices hold, rising."""
    feed: int = 0
    num_feeds: int = 1
    leads: bool = True
    """It reads the shards of its feed; the others of the feed build the same windows from the step record."""

    @property
    def is_whole(self) -> bool:
        return len(self.own) == self.num_shards

    def global_windows(self, window: np.ndarray) -> np.ndarray:
        """Numbers among all windows of the batch, of this host's 0, 1, 2, …"""
        own = np.array(self.own, np.int32)
        return window // len(own) * self.num_shards + own[window % len(own)]

    def local_windows(self, window: np.ndarray) -> np.ndarray:
        """The inverse; -1 for windows of others."""
        place = np.full(self.num_shards, -1, np.int32)
        place[list(self.own)] = np.arange(len(self.own), dtype=np.int32)
        found = place[window % self.num_shards]
        return np.where(found < 0, -1, window // self.num_shards * len(self.own) + found).astype(np.int32)

    def num_own(self, num_windows: int) -> int:
        """This host's of so many windows of the batch, a multiple of `num_shards`."""
        return num_windows // self.num_shards * len(self.own)


def whole_share(num_shards: int) -> Share:
    """Of a host that is alone."""
    return Share(num_shards=num_shards, own=tuple(range(num_shards)))


@functools.lru_cache(maxsize=8)
def share_of(mesh: Mesh) -> Share:
    """This process's, from where its devices lie on the mesh.

    Raises:
        ConfigError: two hosts hold some parts of a batch in common and others not, or unequally many.
    """
    devices = mesh.devices.reshape([mesh.shape.get(axis, 1) for axis in AXES])
    parts = devices.reshape(int(np.prod(devices.shape[: len(WINDOW_AXES)])), -1)
    held: dict[int, set[int]] = {}
    for number, row in enumerate(parts):
        for device in row:
            held.setdefault(device.process_index, set()).add(number)
    return _share(held, jax.process_index(), len(parts))


def _share(held: Mapping[int, set[int]], index: int, num_shards: int) -> Share:
    """
    Args:
        held: host -> parts of the batch that its devices hold.
    """
    feeds = sorted({tuple(sorted(own)) for own in held.values()})
    if sum(len(own) for own in feeds) != num_shards or len({len(own) for own in feeds}) != 1:
        raise ConfigError(
            "mesh",
            {f"host {host}": sorted(own) for host, own in sorted(held.items())},
            f"hosts that hold the same or other ones, equally many, of the {num_shards} parts over data and fsdp",
            "Make tensor * stage a multiple, or a divisor, of the devices of a host.",
        )
    own = tuple(sorted(held[index]))
    first = min(host for host, parts in held.items() if tuple(sorted(parts)) == own)
    return Share(num_shards=num_shards, own=own, feed=feeds.index(own), num_feeds=len(feeds), leads=first == index)


# ---- agreement ----------------------------------------------------------------------------------


class Hosts:
    """The processes of this learner, and how they agree. Alone, everything is decided on the spot."""

    def __init__(self, index: int = 0, num_hosts: int = 1, client: Any = None) -> None:
        """
        Args:
            client: of JAX's coordination service; None where there is one host.
        """
        assert (client is None) == (num_hosts == 1), "several hosts need a client"
        self.index = index
        self.num_hosts = num_hosts
        self._client = client
        self._numbers: collections.Counter[str] = collections.Counter()
        self._abandoned = threading.Event()

    @property
    def alone(self) -> bool:
        return self.num_hosts == 1

    @property
    def is_first(self) -> bool:
        """It decides, and writes what is written once."""
        return self.index == 0

    def lead(self, channel: str, payload: Any, decide: Callable[[list[Any]], _Answer]) -> _Answer:
        """Hand in `payload`; host 0 decides from all of them, in host order, and every host gets its answer.

        Args:
            channel: of one thread on every host; all hosts make the same calls on it in the same order.
            payload: JSON, like the answer.

        Raises:
            PeerLost: another host is gone, or host 0's decision failed.
        """
        if self.alone:
            return decide([payload])
        number = self._numbers[channel]
        self._numbers[channel] += 1
        answer = f"tunix/{channel}/{number}/answer"
        if not self.is_first:
            self._set(f"tunix/{channel}/{number}/{self.index}", payload)
            found = self._get(answer)
            if "failed" in found:
                raise PeerLost(f"host 0, {channel} {number}: {found['failed']}")
            decided: _Answer = found["decided"]
            return decided
        keys = [f"tunix/{channel}/{number}/{host}" for host in range(1, self.num_hosts)]
        payloads = [payload, *(self._get(key) for key in keys)]
        # Whoever handed in this one has read the answer before it.
        self._delete(*keys, *([f"tunix/{channel}/{number - 1}/answer"] if number else []))
        try:
            own = decide(payloads)
        except BaseException as error:
            self._set(answer, {"failed": f"{type(error).__name__}: {error}"})
            raise
        self._set(answer, {"decided": own})
        return own

    def gather(self, channel: str, payload: Any) -> list[Any]:
        """Every host's payload, in host order. See `lead`."""
        return self.lead(channel, payload, lambda payloads: payloads)

    def post(self, name: str, payload: Any) -> None:
        """Put up, or replace, what others may look at with `posted`; waits for nobody."""
        if not self.alone:
            self._set(f"tunix/board/{name}/{self.index}", payload, allow_overwrite=True)

    def posted(self, name: str) -> dict[int, Any]:
        """What other hosts have put up under that name, by host."""
        found = {}
        for host in range(self.num_hosts):
            if host != self.index:
                try:
                    found[host] = _decoded(self._client.key_value_try_get_bytes(f"tunix/board/{name}/{host}"))
                except jax.errors.JaxRuntimeError as error:
                    if "NOT_FOUND" not in str(error):
                        raise PeerLost(f"coordination service: {error}") from error
        return found

    def abandon(self) -> None:
        """Whatever waits for another host, in any thread, gives up."""
        self._abandoned.set()

    def _set(self, key: str, value: Any, *, allow_overwrite: bool = False) -> None:
        data = zlib.compress(json.dumps(value).encode(), 1)
        self._asked(lambda: self._client.key_value_set_bytes(key, data, allow_overwrite=allow_overwrite))

    def _get(self, key: str) -> Any:
        while not self._abandoned.is_set():
            try:
                wait = int(_LOOK_AGAIN_SECONDS * 1000)
                return _decoded(self._client.blocking_key_value_get_bytes(key, wait))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerLost(f"coordination service: {error}") from error
        raise PeerLost(f"gave up waiting for {key}")

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self._asked(functools.partial(self._client.key_value_delete, key))

    @staticmethod
    def _asked(call: Callable[[], None]) -> None:
        try:
            call()
        except jax.errors.JaxRuntimeError as error:
            raise PeerLost(f"coordination service: {error}") from error


ALONE = Hosts()


def _decoded(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


# ---- coming together ----------------------------------------------------------------------------


def initialise_from_environment(environ: Mapping[str, str] = os.environ) -> Hosts:
    """Join the other hosts, if there are any (see `tunix_core.meeting`); before anything touches a device.

    Raises:
        ConfigError: half a description of the hosts.
        PeerLost: they did not all come.
    """
    meeting = meeting_of(environ)
    if meeting is None:
        return ALONE
    silent = meeting.peer_timeout_seconds
    options: dict[str, Any] = {"heartbeat_timeout_seconds": silent, "shutdown_timeout_seconds": _JOIN_SECONDS}
    if not meeting.detected:
        options |= {
            "coordinator_address": meeting.coordinator,
            "num_processes": meeting.num_hosts,
            "process_id": meeting.index,
            "cluster_detection_method": "deactivate",
        }
        if meeting.coordinator.startswith(("127.", "localhost:")):  # nobody else is to reach it
            options["coordinator_bind_address"] = meeting.coordinator
    # It would take SIGTERM for itself; a learner that is asked to end tells the others, see `learner.pipeline`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(initialization_timeout=_JOIN_SECONDS, **options)
    except RuntimeError as error:
        raise PeerLost(f"hosts did not come together: {error}") from error
    from jax._src import distributed  # the service's client has no public name; Orbax takes it from here, too

    if jax.process_count() == 1:
        return ALONE
    return Hosts(jax.process_index(), jax.process_count(), distributed.global_state.client)


def leave(hosts: Hosts) -> None:
    """Part from the others at the end of a run: waits until all have come to it."""
    if not hosts.alone:
        jax.distributed.shutdown()
