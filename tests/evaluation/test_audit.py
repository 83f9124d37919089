from __future__ import annotations

import pytest

from tests.support.run_factory import GROUP_SIZE, make_run
from tunix_core.errors import CorruptObject
from tunix_core.evaluation.audit import audit_run, ledger_faults
from tunix_core.storage.step_records import read_steps, write_step
from tunix_core.storage.store import open_store

BATCH = 2 * GROUP_SIZE


@pytest.fixture
def run(tmp_path):
    return make_run(open_store(str(tmp_path)), num_steps=4, lag=2)


def test_figures_of_a_sound_run(run):
    audit = audit_run(run.store, max_staleness=2)
    # consuming clocks 0, 1, 2, 3 of versions 0, 0, 0, 1
    assert audit.staleness == {0: BATCH, 1: BATCH, 2: 2 * BATCH}
    assert audit.max_staleness_seen == 2
    assert audit.staleness_violations == 0
    assert audit.consumed_twice == []
    assert audit.policy_versions == [0, 1, 2]
    assert [step.clock for step in audit.steps] == [1, 2, 3, 4]
    assert [step.success_share for step in audit.steps] == [0.25, 0.5, 0.75, 1.0]
    assert audit.consumed_tokens == run.ledger["consumed"]
    assert audit.written_tokens == run.ledger["read"] > audit.consumed_tokens
    assert 0 < audit.generated_tokens < audit.written_tokens
    assert ledger_faults(run.ledger, audit) == []


def test_a_bound_that_was_broken_shows(run):
    assert audit_run(run.store, max_staleness=1).staleness_violations == 2 * BATCH


def test_a_trajectory_consumed_twice_shows(run):
    steps = read_steps(run.store, 0)
    write_step(run.store, 5, {**steps[0], "clock": 5})
    audit = audit_run(run.store, max_staleness=10)
    assert len(audit.consumed_twice) == BATCH
    assert audit.staleness[4] == BATCH, "staleness counts at the step that consumes"
    assert any("consumed" in fault for fault in ledger_faults(run.ledger, audit))


def test_a_ledger_that_does_not_add_up_shows(run):
    audit = audit_run(run.store, max_staleness=2)
    assert "add up" in ledger_faults({**run.ledger, "stale": 1}, audit)[0]
    moved = {**run.ledger, "consumed": run.ledger["consumed"] - 5, "surplus": run.ledger["surplus"] + 5}
    assert ledger_faults(moved, audit) == [
        f"ledger: consumed {moved['consumed']} tokens, the step records hold {audit.consumed_tokens}"
    ]
    invented = {**run.ledger, "read": run.ledger["read"] + 1, "stale": 1}
    assert "the shards hold" in ledger_faults(invented, audit)[0]
    assert ledger_faults({"read": 0}, audit)[0].endswith("missing")


def test_unreadable_shards_are_named_and_one_that_was_consumed_is_fatal(run):
    stray = run.shards[0].replace("-inc0-", "-inc7-")
    run.store.put_if_absent(stray, b"PAR1 no more")
    assert list(audit_run(run.store, max_staleness=2).unreadable) == [stray]
    run.store.delete(run.shards[0])
    with pytest.raises(CorruptObject, match=r"step 1 consumed .*-inc0-00000000\.parquet row 0"):
        audit_run(run.store, max_staleness=2)


def test_a_record_of_another_form_is_named(run):
    write_step(run.store, 5, {"rows": []})
    with pytest.raises(CorruptObject, match="step record 5: KeyError"):
        audit_run(run.store, max_staleness=2)


def test_before_the_first_step_there_is_nothing(tmp_path):
    audit = audit_run(open_store(str(tmp_path)), max_staleness=2)
    assert (audit.steps, audit.staleness, audit.max_staleness_seen) == ([], {}, 0)
