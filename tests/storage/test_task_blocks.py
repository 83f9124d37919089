from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stores import ScriptedStore
from tests.support.trajectories import make_group
from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, Fenced
from tunix_core.storage.store import ObjectStore, open_store, read_json, write_json
from tunix_core.storage.task_blocks import TaskBlock, TaskBlocks, claim_block, finish_block
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import fence_incarnation

_SPACES = itertools.count()


def blocks(store: ObjectStore, incarnation: str = "inc0", epoch_size: int = 10, block_size: int = 4) -> TaskBlocks:
    return TaskBlocks(store, incarnation=incarnation, epoch_size=epoch_size, block_size=block_size)


def test_epochs_follow_each_other_without_end(store: ObjectStore) -> None:
    mine = blocks(store)
    claimed = [mine.claim() for _ in range(7)]
    assert [(b.epoch, b.block, b.start, b.stop) for b in claimed] == [
        *((0, 0, 0, 4), (0, 1, 4, 8), (0, 2, 8, 10)),
        *((1, 0, 0, 4), (1, 1, 4, 8), (1, 2, 8, 10)),
        (2, 0, 0, 4),
    ]
    record = read_json(store, "tasks/00000001/00000002.json")
    assert record["incarnation"] == "inc0"


def test_no_block_is_claimed_twice(store: ObjectStore) -> None:
    barrier = threading.Barrier(16)

    def claim(index: int) -> list[TaskBlock]:
        mine = blocks(store, f"inc{index}")
        barrier.wait()
        return [mine.claim(dead=()) for _ in range(4)]

    with ThreadPoolExecutor(16) as pool:
        claimed = [block for won in pool.map(claim, range(16)) for block in won]
    order = sorted((b.epoch, b.block) for b in claimed)
    assert order == [divmod(i, 3) for i in range(64)]


def test_a_newcomer_finds_the_end_and_then_remembers_it(memory: ObjectStore) -> None:
    first = blocks(memory)
    for _ in range(200):
        first.claim(dead=())
    store = ScriptedStore(memory)
    newcomer = blocks(store, "inc1")
    assert newcomer.claim(dead=()) == TaskBlock(epoch=66, block=2, start=8, stop=10)
    assert len(store.calls) < 30
    store.calls.clear()
    assert newcomer.claim(dead=()).epoch == 67
    assert len(store.calls) <= 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 40))
def test_the_end_is_found_from_anywhere(num_claimed: int, behind: int) -> None:
    store = open_store(f"memory://blocks-{next(_SPACES)}")
    first = blocks(store)
    late = blocks(store, "late")
    for index in range(num_claimed):
        first.claim(dead=())
        if index == behind:
            late._find_end()
    late._find_end()
    assert late._end == num_claimed


def test_a_dead_ones_unfinished_blocks_are_taken_over(store: ObjectStore) -> None:
    dead, heir = blocks(store, "dead"), blocks(store, "heir")
    finished, unfinished, other = dead.claim(), dead.claim(), heir.claim()
    dead.finish(finished)
    assert heir.claim(dead=()) == TaskBlock(epoch=1, block=0, start=0, stop=4)
    assert heir.claim(dead={"dead"}) == unfinished
    record = read_json(store, paths.task_block(unfinished.epoch, unfinished.block))
    assert (record["incarnation"], record["claims"], record["finished"]) == ("heir", 2, False)
    with pytest.raises(Fenced, match="heir"):
        dead.finish(unfinished)
    assert heir.claim(dead={"dead"}).epoch == 1
    heir.finish(unfinished)
    heir.finish(other)


def test_an_inheritance_has_one_heir(store: ObjectStore) -> None:
    for _ in range(3):
        blocks(store, "dead").claim()
    barrier = threading.Barrier(8)

    def claim(index: int) -> TaskBlock:
        heir = blocks(store, f"heir{index}")
        barrier.wait()
        return heir.claim(dead={"dead"})

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim, range(8)))
    order = sorted((b.epoch, b.block) for b in claimed)
    assert order == [divmod(i, 3) for i in range(8)]


@pytest.mark.parametrize("end", ["close", "fence"])
def test_ended_writers_are_dead(memory: ObjectStore, end: str) -> None:
    writer = TrajectoryWriter(memory, actor_id="a", incarnation="gone")
    block = blocks(memory, "gone").claim()
    heir = blocks(memory, "heir")
    assert heir.claim().block == 1  # its owner lives
    unannounced = blocks(memory, "young").claim()
    writer.write(make_group(0))
    if end == "close":
        writer.close()
    else:
        fence_incarnation(memory, "gone")
    assert heir.claim() == block
    assert heir.claim() != unannounced


def test_looking_for_the_dead_costs_blocks_in_flight_only(memory: ObjectStore) -> None:
    worker = blocks(memory, "worker")
    for _ in range(100):
        worker.finish(worker.claim())
    store = ScriptedStore(memory)
    newcomer = blocks(store, "newcomer")
    newcomer.claim(dead={"someone"})
    assert len(store.calls) < 15


def test_a_lagging_count_is_made_good(memory: ObjectStore) -> None:
    worker = blocks(memory)
    claimed = [worker.claim() for _ in range(5)]
    for block in reversed(claimed):
        worker.finish(block)
    assert read_json(memory, paths.FINISHED_BLOCKS) == {"num_finished": 5}
    worker.finish(claimed[0])  # again: fine
    memory.delete(paths.FINISHED_BLOCKS)
    worker.finish(worker.claim())
    assert read_json(memory, paths.FINISHED_BLOCKS) == {"num_finished": 6}


def test_claimants_that_cut_differently_are_refused(memory: ObjectStore) -> None:
    blocks(memory).claim()
    with pytest.raises(ConfigError, match="cuts tasks alike"):
        blocks(memory, "inc1", block_size=5).claim(dead={"inc0"})
    with pytest.raises(ConfigError, match="block_size"):
        blocks(memory, block_size=11)


def test_a_broken_block_is_named(memory: ObjectStore) -> None:
    blocks(memory).claim()
    write_json(memory, paths.task_block(0, 0), {})
    with pytest.raises(CorruptObject, match="tasks/00000000"):
        blocks(memory, "inc1").claim(dead={"inc0"})


def test_functions(memory: ObjectStore) -> None:
    sizes = {"incarnation": "inc0", "epoch_size": 10, "block_size": 4}
    first, second = claim_block(memory, **sizes), claim_block(memory, **sizes)
    assert (first.block, second.block) == (0, 1)
    finish_block(memory, first, **sizes)
    assert read_json(memory, paths.task_block(0, 0))["finished"]
