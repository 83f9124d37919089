"""An exception killed the step (SkyRL #1613, verifiers #589)."""

from collections import Counter

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.store import open_store

KINDS = {
    "raise": "environment_failure",
    "crash": "environment_ZeroDivisionError",
    "hang": "environment_timeout",
}
"""What breaks in an environment -> what it is counted under."""


def test_one_failed_rollout_costs_one_rollout(tmp_path) -> None:
    """Every tenth attempt breaks, in three ways: the run completes, and each failure is counted by kind."""
    broken: Counter[str] = Counter()

    def fault(seed: int) -> str:
        if seed % 10:
            return ""
        kind = list(KINDS)[seed // 10 % 3]
        broken[kind] += 1
        return kind

    def enough(learner: ScriptedLearner) -> bool:
        beat = read_heartbeat(learner.store, "actor-0-0")
        return len(learner.groups()) >= 30 and beat is not None and set(beat.progress["failures"]) == {*KINDS.values()}

    learner, actor = run_actor(open_store(str(tmp_path)), enough, fault=fault)
    progress = actor.progress()
    counted = progress["failures"]
    assert set(counted) == {*KINDS.values()}
    # Attempts that never reach a step (the policy talks past its limit) or are under way at the end do not fail.
    for kind, name in KINDS.items():
        assert 0 < counted[name] <= broken[kind]
    assert progress["failed_attempts"] == sum(counted.values())
    sizes = Counter(len(members) for members in learner.groups().values())
    assert min(sizes) >= 2
    # A retried member is in its group again; with one attempt in ten broken hardly a group stays smaller.
    assert sizes[CONFIG.algorithm.group_size] >= 0.9 * sizes.total()
    lost = sum(CONFIG.algorithm.group_size - size for size in sizes.elements())
    assert lost <= progress["lost_episodes"]
