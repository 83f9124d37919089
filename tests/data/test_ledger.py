import numpy as np
import pytest

from tunix_core.data.ledger import Ledger
from tunix_core.errors import CorruptObject


def test_identity_and_round_trip() -> None:
    ledger = Ledger()
    ledger.receive("buffered", np.array([5, 7]))
    ledger.receive("overlong", np.array([99]))
    ledger.move("buffered", "consumed", np.array([7]))
    ledger.reuse(np.array([7]))
    ledger.refuse_shard("trajectories/x", 1234)
    assert ledger.balanced
    assert ledger.tokens() == {
        "read": 111,
        "consumed": 7,
        "stale": 0,
        "duplicate": 0,
        "quarantined": 0,
        "filtered": 0,
        "overlong": 99,
        "surplus": 0,
        "buffered": 5,
    }
    assert ledger.trajectories()["read"] == 3
    assert Ledger.restore(ledger.state()).state() == ledger.state()


def test_a_state_that_does_not_add_up_is_refused() -> None:
    state = Ledger().state()
    state["read"]["tokens"] = 1
    with pytest.raises(CorruptObject, match="add up"):
        Ledger.restore(state)
