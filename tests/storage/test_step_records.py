from __future__ import annotations

import pytest

from tests.support.stores import ScriptedStore
from tunix_core import paths
from tunix_core.errors import CorruptObject, Fenced, StoreError
from tunix_core.storage.step_records import read_steps, write_step
from tunix_core.storage.store import ObjectStore, write_json


def test_records_are_read_in_order_behind_a_clock(store: ObjectStore) -> None:
    for clock in range(1, 13):
        write_step(store, clock, {"incarnation": "inc0", "rows": [["s", clock]]})
    assert [record["clock"] for record in read_steps(store, 0)] == list(range(1, 13))
    assert [record["rows"] for record in read_steps(store, 10)] == [[["s", 11]], [["s", 12]]]
    assert read_steps(store, 12) == []


def test_the_second_learner_is_fenced(store: ObjectStore) -> None:
    write_step(store, 1, {"incarnation": "inc0"})
    with pytest.raises(Fenced, match="already written by inc0"):
        write_step(store, 1, {"incarnation": "inc1"})
    assert read_steps(store, 0)[0]["incarnation"] == "inc0"


def test_an_answer_that_was_lost_fences_no_one(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    store.script = lambda verb, _key: "lose" if verb == "put_if_absent" else "pass"
    with pytest.raises(StoreError):
        write_step(store, 1, {"incarnation": "inc0"})
    store.script = lambda _verb, _key: "pass"
    write_step(store, 1, {"incarnation": "inc0"})
    assert len(read_steps(memory, 0)) == 1


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_record_is_an_error(memory: ObjectStore, missing: int) -> None:
    for clock in (1, 2, 3):
        write_step(memory, clock, {})
    memory.delete(paths.step(missing))
    with pytest.raises(CorruptObject, match="a record is missing"):
        read_steps(memory, 0)


def test_a_record_under_the_wrong_name_is_an_error(memory: ObjectStore) -> None:
    write_json(memory, paths.step(1), {"clock": 2})
    with pytest.raises(CorruptObject):
        read_steps(memory, 0)
