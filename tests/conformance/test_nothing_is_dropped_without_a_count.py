"""Surplus drained silently (slime #2238, verl's message queue)."""

import math

from tests.data.support import make_group, make_rows, make_trajectory
from tests.data.test_buffer import make_buffer
from tunix_core.types import LEDGER_CLASSES


def test_nothing_is_dropped_without_a_count() -> None:
    """Every class of the ledger is reached, by hand-computed tokens; the identity holds after each operation."""
    buffer = make_buffer(max_staleness=2, window_tokens=16)
    group = 12 + 9
    delivered = 0

    def deliver(shard, trajectories, **kwargs):
        nonlocal delivered
        buffer.add(make_rows(shard, trajectories, **kwargs))
        delivered += sum(t.num_tokens for t in trajectories)
        assert buffer.ledger.balanced
        assert buffer.ledger.tokens()["read"] == delivered

    buffer.advance(2)
    deliver("s0", make_group("a", version=1) + make_group("b", version=2) + make_group("c", version=2))
    deliver("s1", make_group("a", version=1))  # duplicate
    deliver("s2", make_group("d", version=2, size=3, lengths=[12, 9, 40]))  # 40 overlong
    deliver("s3", make_group("e", version=2, size=3, lengths=[12, 9, 7]), faults={2: "broken"})  # 7 quarantined
    deliver("s4", [make_trajectory("f/0", length=11, version=2)])  # filtered: no baseline
    buffer.consume(buffer.take(2, 2, max_mean_staleness=math.inf).groups, 2)  # a, b
    buffer.advance(5)
    deliver("s5", make_group("g", version=3) + make_group("h", version=5))
    taken = buffer.take(1, 5, max_mean_staleness=math.inf)  # g; c, d, e became stale
    buffer.consume(taken.groups, 5)
    assert buffer.ledger.tokens()["buffered"] == group
    buffer.finish()  # h is left
    assert buffer.ledger.tokens() == {
        "read": delivered,
        "consumed": 3 * group,
        "stale": 3 * group,
        "duplicate": group,
        "quarantined": 7,
        "filtered": 11,
        "overlong": 40,
        "surplus": group,
        "buffered": 0,
    }
    assert set(LEDGER_CLASSES) < set(buffer.ledger.tokens())
