import dataclasses
import socket

import pytest

from tunix_core.data.liveness import FENCE_SECONDS, FENCE_UNPROVEN_SECONDS, LIVE_SECONDS, Liveness
from tunix_core.processes import boot_id
from tunix_core.storage.control import ProcessRecord, create_process, write_heartbeat
from tunix_core.storage.store import open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import read_writer

RECORD = ProcessRecord(
    process="actor-0",
    submission_key="k",
    attempt=1,
    host=socket.gethostname(),
    boot_id="",
    pid=1,
    pid_start=-1,
    state="running",
)


class Pool:
    """Actors that are alive when told so."""

    def __init__(self, tmp_path) -> None:
        self.store = open_store(str(tmp_path))
        self.now = 0.0
        self.liveness = Liveness(self.store, monotonic=lambda: self.now)
        self.writers: dict[str, str] = {}

    def announce(self, incarnation: str, actor_id: str) -> None:
        TrajectoryWriter(self.store, actor_id=actor_id, incarnation=incarnation)
        self.writers[incarnation] = actor_id

    def pass_seconds(self, seconds: int, *beating: str) -> list[str]:
        live = []
        for _ in range(seconds):
            self.now += 1
            for incarnation in beating:
                process = self.writers[incarnation].replace("_", "-")
                write_heartbeat(self.store, process, {"incarnation": incarnation}, clock=lambda: 1e6 + self.now)
            live = self.liveness.update(self.writers)
            self.writers = {n: a for n, a in self.writers.items() if not read_writer(self.store, n).closed}
        return live


@pytest.fixture
def pool(tmp_path) -> Pool:
    pool = Pool(tmp_path)
    pool.announce("a0", "actor_0_0")
    pool.announce("b0", "actor_1_0")
    return pool


def test_beating_writers_are_live_in_rank_order(pool: Pool) -> None:
    assert pool.pass_seconds(30, "b0", "a0") == ["a0", "b0"]
    assert pool.liveness.num_fenced == 0


def test_a_silent_one_loses_its_share_and_a_minute_later_its_life(pool: Pool) -> None:
    assert pool.pass_seconds(int(LIVE_SECONDS), "a0") == ["a0", "b0"]
    assert pool.pass_seconds(3, "a0") == ["a0"]
    pool.pass_seconds(int(FENCE_UNPROVEN_SECONDS) - 14, "a0")
    assert not read_writer(pool.store, "b0").closed
    pool.pass_seconds(4, "a0")
    assert read_writer(pool.store, "b0").fenced
    assert not read_writer(pool.store, "a0").closed


def test_a_record_of_its_exit_is_proof(pool: Pool) -> None:
    create_process(pool.store, dataclasses.replace(RECORD, process="actor-1", state="exited"))
    pool.pass_seconds(int(FENCE_SECONDS) + 3, "a0")
    assert read_writer(pool.store, "b0").fenced


@pytest.mark.parametrize(("own_boot", "fenced"), [(True, True), (False, False)])
def test_a_vanished_process_is_proof_on_its_own_boot_only(pool: Pool, own_boot: bool, fenced: bool) -> None:
    boot = boot_id() if own_boot else "another"
    create_process(pool.store, dataclasses.replace(RECORD, process="actor-1", boot_id=boot))
    pool.pass_seconds(int(FENCE_SECONDS) + 3, "a0")
    assert read_writer(pool.store, "b0").fenced == fenced


def test_a_newer_incarnation_of_the_same_actor_replaces_it(pool: Pool) -> None:
    pool.pass_seconds(2, "a0", "b0")
    pool.announce("b1", "actor_1_0")
    pool.pass_seconds(1, "a0", "b0")
    assert not read_writer(pool.store, "b0").closed, "the new one has not shown a heartbeat yet"
    assert pool.pass_seconds(1, "a0", "b1") == ["a0", "b1"]
    assert read_writer(pool.store, "b0").fenced


def test_our_own_absence_kills_no_one(pool: Pool) -> None:
    pool.pass_seconds(3, "a0", "b0")
    pool.now += 600
    assert pool.liveness.update(pool.writers) == ["a0", "b0"]
