import math

import numpy as np

from tests.data.support import centered, make_group, make_rows, make_trajectory
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.rows import Rows
from tunix_core.errors import CorruptObject


def make_buffer(**overrides) -> ReplayBuffer:
    settings = {"window_tokens": 16, "max_staleness": 2, "buffer_bytes": 2**20} | overrides
    return ReplayBuffer(group_advantages=centered, **settings)


def take(buffer: ReplayBuffer, num_groups: int, clock: int, max_mean_staleness: float = math.inf):
    return buffer.take(num_groups, clock, max_mean_staleness=max_mean_staleness)


def ids(groups) -> list[str]:
    return [g.group_id for g in groups]


def test_a_batch_is_whole_groups_oldest_version_first() -> None:
    buffer = make_buffer()
    buffer.advance(3)
    buffer.add(make_rows("s0", make_group("new", version=3) + make_group("old", version=1)))
    buffer.add(make_rows("s1", make_group("mid", version=2)))
    taken = take(buffer, 2, 3)
    assert ids(taken.groups) == ["old", "mid"]
    assert taken.mean_staleness == 1.5
    np.testing.assert_array_equal(taken.groups[0].advantages, [-0.5, 0.5])
    assert buffer.ledger.tokens()["buffered"] == 3 * 21
    buffer.consume(taken.groups, 3)
    assert buffer.ledger.tokens()["consumed"] == 2 * 21


def test_freshest_first() -> None:
    buffer = make_buffer(order="freshest_first")
    buffer.advance(3)
    buffer.add(make_rows("s", make_group("a", version=1) + make_group("b", version=3) + make_group("c", version=2)))
    assert ids(take(buffer, 2, 3).groups) == ["b", "c"]


def test_waiting_for_fresher_data_lowers_the_mean() -> None:
    buffer = make_buffer()
    buffer.advance(2)
    buffer.add(make_rows("s0", make_group("a", version=0) + make_group("b", version=0)))
    refused = take(buffer, 2, 2, max_mean_staleness=1.0)
    assert refused.groups is None
    assert (refused.num_fresh, refused.mean_staleness) == (2, 2.0)
    buffer.add(make_rows("s1", make_group("c", version=2)))
    taken = take(buffer, 2, 2, max_mean_staleness=1.0)
    assert (ids(taken.groups), taken.mean_staleness) == (["a", "c"], 1.0)


def test_stale_at_ingest_and_at_consumption_as_a_whole_group() -> None:
    buffer = make_buffer()
    buffer.advance(3)
    mixed = [make_trajectory("m/0", version=0, reward=1.0), make_trajectory("m/1", version=3)]
    buffer.add(make_rows("s0", mixed))
    assert buffer.ledger.trajectories()["stale"] == 2
    buffer.add(make_rows("s1", make_group("g", version=1)))
    assert buffer.num_fresh(3) == 1
    assert take(buffer, 1, 4).groups is None
    assert buffer.ledger.trajectories()["stale"] == 4
    assert buffer.ledger.balanced


def test_duplicates_by_trajectory_and_by_group() -> None:
    buffer = make_buffer()
    group = make_group("g", size=4)
    buffer.add(make_rows("s0", group))
    assert buffer.add(make_rows("s1", group)) == {}
    assert buffer.ledger.trajectories()["duplicate"] == 4
    reissued = [make_trajectory(f"other/{i}", group_id="g") for i in range(2)]
    buffer.add(make_rows("s2", reissued))
    assert buffer.ledger.trajectories()["duplicate"] == 6
    assert buffer.ledger.trajectories()["buffered"] == 4


def test_a_reissued_block_deduplicates_as_whole_groups() -> None:
    """Its actor died after delivering some groups; another one plays all of them again, with other outcomes."""
    buffer = make_buffer()
    buffer.add(make_rows("s0", make_group("g", size=4)))
    again = make_group("g", size=4, content=1, incarnation="a1") + make_group("h", size=4, incarnation="a1")
    assert buffer.add(make_rows("s1", again)) == {}
    assert buffer.ledger.trajectories()["duplicate"] == 4
    assert buffer.ledger.trajectories()["buffered"] == 8


def test_a_group_of_which_nothing_was_usable_may_come_again() -> None:
    buffer = make_buffer()
    buffer.add(make_rows("s0", make_group("g"), faults={0: "broken", 1: "broken"}))
    buffer.add(make_rows("s1", make_group("g", incarnation="a1")))
    assert buffer.ledger.trajectories()["quarantined"] == 2
    assert buffer.ledger.trajectories()["buffered"] == 2


def test_the_same_id_with_other_content_is_quarantined_and_equal_content_under_two_ids_stays() -> None:
    buffer = make_buffer()
    buffer.add(make_rows("s0", make_group("g")))
    forged = [make_trajectory("g/0", content=1), make_trajectory("g/1", reward=1.0, length=9)]
    refused = buffer.add(make_rows("s1", forged))
    assert list(refused) == [0]
    assert "other content" in refused[0]
    twins = [make_trajectory("h/0", reward=1.0), make_trajectory("h/1")]
    rows = make_rows("s2", twins)
    object.__setattr__(rows, "content_hashes", ["equal", "equal"])
    assert buffer.add(rows) == {}
    assert buffer.ledger.trajectories() | {"read": 0} == {
        "read": 0,
        "consumed": 0,
        "stale": 0,
        "duplicate": 1,
        "quarantined": 1,
        "filtered": 0,
        "overlong": 0,
        "surplus": 0,
        "buffered": 4,
    }


def test_faulty_rows_cost_themselves_only() -> None:
    buffer = make_buffer()
    group = make_group("g", size=4)
    refused = buffer.add(make_rows("s", group, faults={2: "behavior_logprobs: not finite"}))
    assert refused == {2: "behavior_logprobs: not finite"}
    (held,) = take(buffer, 1, 0).groups
    assert held.rows.trajectory_ids == ["g/0", "g/1", "g/3"]
    np.testing.assert_allclose(held.advantages, [-2 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    assert buffer.missing_episodes == 1


def test_rows_no_policy_could_have_written_are_quarantined() -> None:
    buffer = make_buffer()
    ahead = make_group("a", version=1)
    no_reward = [make_trajectory("b/0", reward=math.nan), make_trajectory("b/1", temperature=0.0)]
    assert len(buffer.add(make_rows("s", ahead + no_reward))) == 4
    assert buffer.ledger.trajectories()["quarantined"] == 4


def test_overlong_is_counted_and_its_reward_stays_in_the_baseline() -> None:
    buffer = make_buffer()
    buffer.add(make_rows("s", make_group("g", size=4, lengths=[5, 17, 6, 7])))
    assert buffer.ledger.tokens()["overlong"] == 17
    (held,) = take(buffer, 1, 0).groups
    np.testing.assert_array_equal(held.advantages, [-0.5, -0.5, 0.5])


def test_groups_without_a_signal_are_filtered() -> None:
    alone = [make_trajectory("alone/0")]
    silent = [make_trajectory(f"silent/{i}", length=4) for i in range(2)]  # prompt only
    equal = [make_trajectory(f"equal/{i}", reward=1.0) for i in range(3)]
    buffer = make_buffer()
    buffer.add(make_rows("s", alone + silent + equal))
    assert buffer.ledger.trajectories()["filtered"] == 3
    buffer = make_buffer(filter_zero_signal=True)
    buffer.add(make_rows("s", alone + silent + equal))
    assert buffer.ledger.trajectories()["filtered"] == 6


def test_memory_bound_evicts_the_oldest_version_but_not_the_prepared_batch() -> None:
    one = make_buffer()
    one.add(make_rows("s", make_group("g")))
    size = one._bytes
    buffer = make_buffer(buffer_bytes=2 * size)
    buffer.advance(2)
    buffer.add(make_rows("s0", make_group("a", version=0)))
    prepared = take(buffer, 1, 2).groups
    buffer.add(make_rows("s1", make_group("b", version=1)))
    buffer.add(make_rows("s2", make_group("c", version=2)))
    assert buffer.ledger.trajectories()["surplus"] == 2
    buffer.consume(prepared, 2)
    assert ids(take(buffer, 1, 2).groups) == ["c"]


def test_finish_leaves_nothing_buffered() -> None:
    buffer = make_buffer()
    buffer.add(make_rows("s", make_group("a") + make_group("b")))
    take(buffer, 1, 0)
    buffer.finish()
    assert buffer.ledger.trajectories()["surplus"] == 4
    assert buffer.ledger.trajectories()["buffered"] == 0


def test_restore_continues_with_the_same_batch() -> None:
    buffer = make_buffer()
    shards = {"s0": make_rows("s0", make_group("a") + make_group("b")), "s1": make_rows("s1", make_group("c"))}
    for rows in shards.values():
        buffer.add(rows)
    take(buffer, 1, 0)
    values, arrays = buffer.state()
    again = make_buffer()
    assert again.restore(values, arrays, lambda refs: fetch(shards, refs)) == {}
    assert again.state()[0] == values
    assert ids(take(again, 3, 0).groups) == ["a", "b", "c"]
    again.add(shards["s0"])
    assert again.ledger.trajectories()["duplicate"] == 4


def test_a_shard_that_vanished_costs_its_groups_only() -> None:
    buffer = make_buffer()
    shards = {"s0": make_rows("s0", make_group("a")), "s1": make_rows("s1", make_group("b"))}
    for rows in shards.values():
        buffer.add(rows)
    values, arrays = buffer.state()
    del shards["s0"]
    again = make_buffer()
    refused = again.restore(values, arrays, lambda refs: fetch(shards, refs))
    assert {ref.shard for ref in refused} == {"s0"}
    assert again.ledger.trajectories()["quarantined"] == 2
    assert again.ledger.balanced


def fetch(shards: dict[str, Rows], refs) -> Rows:
    if refs[0].shard not in shards:
        raise CorruptObject("gone")
    return shards[refs[0].shard].take(np.array([ref.row for ref in refs]))
