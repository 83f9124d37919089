import dataclasses
import json
import threading

import numpy as np
import pytest

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor
from tests.actor.support import expected_logprobs, weights
from tunix_core.config import StalenessConfig
from tunix_core.environments import task_seed
from tunix_core.errors import Interrupted
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.store import open_store, read_json
from tunix_core.storage.writers import read_writers
from tunix_core.tokenizer import ByteTokenizer


def test_whole_groups_arrive_with_their_tokens_exact(tmp_path) -> None:
    store = open_store(str(tmp_path))
    learner, actor = run_actor(store, lambda learner: len(learner.groups()) >= 12)
    progress = actor.progress()

    assert all(len(shard) <= CONFIG.actor.max_groups_per_shard for shard in learner.shards)
    delivered = [group for shard in learner.shards for group in shard]
    assert len(delivered) == len(set(delivered)), "a group is split over shards"
    for group_id, members in learner.groups().items():
        assert len(members) == CONFIG.algorithm.group_size
        assert [m.episode_id for m in sorted(members, key=lambda m: m.episode_id)] == [
            f"{group_id}-{i:03d}" for i in range(CONFIG.algorithm.group_size)
        ]
        assert {m.task_seed for m in members} == {task_seed("train", int(group_id.split("-")[1]), CONFIG.seed)}
        for member in members:
            check_trajectory(member)

    (writer,) = read_writers(store)
    assert writer.closed
    assert not writer.fenced
    assert progress["compilations_after_warmup"] == 0
    assert progress["episodes"] >= 48
    assert read_heartbeat(store, "actor-0-0").progress["policy_tokens"] > 0
    assert "tokens_per_second" in read_metrics(store, "actor-0-0") or progress["policy_tokens"] > 0


def check_trajectory(row) -> None:
    """Turns tile the tokens; policy turns are the mask; messages show what was said; log-probabilities fit."""
    assert [turn.start for turn in row.turns] == [0] + [turn.end for turn in row.turns[:-1]]
    assert row.turns[-1].end == row.num_tokens
    mask = np.zeros(row.num_tokens, bool)
    for turn in row.turns:
        mask[turn.start : turn.end] = turn.role == "policy"
    np.testing.assert_array_equal(row.loss_mask, mask)
    assert (row.token_policy_version[mask] == 0).all()
    messages = json.loads(row.messages)
    assert [message["role"] for message in messages] == [turn.role for turn in row.turns]
    for message, turn in zip(messages, row.turns, strict=True):
        ids = row.tokens[turn.start : turn.end].tolist()
        if turn.role == "prompt":
            assert ids.pop(0) == ByteTokenizer.BOS
        ended = ids[-1] == ByteTokenizer.END_OF_TURN
        assert ended or (turn.role == "policy" and row.finish_reason.startswith("max_"))
        assert message["content"] == ByteTokenizer().decode(ids[:-1] if ended else ids)
    expected = expected_logprobs(weights(0), row.tokens, CONFIG.algorithm.temperature)
    np.testing.assert_allclose(row.behavior_logprobs[mask], expected[mask], atol=2e-5)


def test_groups_in_flight_stay_within_the_allowance(tmp_path) -> None:
    seen = []

    def script(learner: ScriptedLearner) -> bool:
        # Three groups are allowed; nothing is read for a while, so nothing more may begin.
        beat = read_heartbeat(learner.store, "actor-0-0")
        if beat is not None:
            seen.append((beat.progress["groups_in_flight"], beat.progress["episodes"]))
        learner.reads = len(seen) > 60
        return len(learner.groups()) >= 6

    learner, _ = run_actor(open_store(str(tmp_path)), script, capacity=3)
    assert max(groups for groups, _ in seen) == 3
    assert (3, 12) in seen, "the allowance must have been used up"
    assert len(learner.groups()) >= 6


def test_a_zero_share_starts_nothing(tmp_path) -> None:
    polls = []

    def script(learner: ScriptedLearner) -> bool:
        polls.append(1)
        return read_heartbeat(learner.store, "actor-0-0") is not None and len(polls) > 40

    learner, actor = run_actor(open_store(str(tmp_path)), script, capacity=0)
    assert learner.trajectories == []
    assert actor.progress()["episodes"] == 0


def test_bound_zero_waits_for_the_current_clocks_weights(tmp_path) -> None:
    def script(learner: ScriptedLearner) -> bool:
        if learner.clock == 0 and len(learner.groups()) >= 6:
            learner.clock = 1
            learner.capacity = 50
        elif learner.clock == 1 and actor_waits(learner):
            learner.clock = 2
            waited.clear()
        elif learner.clock == 2 and learner.newest == 0 and actor_waits(learner):
            learner.publish(1, 1)  # behind the clock already: nothing may be started with it
            waited.clear()
        return learner.newest == 1 and actor_waits(learner)

    waited = []

    def actor_waits(learner: ScriptedLearner) -> bool:
        beat = read_heartbeat(learner.store, "actor-0-0")
        waited.append(beat.progress["groups_in_flight"] if beat else -1)
        return len(waited) > 30 and waited[-30:] == [0] * 30

    config = dataclasses.replace(CONFIG, staleness=StalenessConfig(max_staleness=0, max_mean_staleness=0))
    learner, actor = run_actor(open_store(str(tmp_path)), script, config=config, capacity=6)
    assert {row.policy_version_max for row in learner.trajectories} == {0}
    assert actor.progress()["version"] in (0, 1)


@pytest.mark.parametrize("policy", ["turn", "immediate"])
def test_new_weights_arrive_between_dispatches(tmp_path, policy: str) -> None:
    def script(learner: ScriptedLearner) -> bool:
        newest = max((row.policy_version_max for row in learner.trajectories), default=-1)
        if newest in (0, 1):
            learner.publish(newest + 1, newest + 1)
        return newest == 2 and len(learner.groups()) >= 8

    config = dataclasses.replace(CONFIG, actor=dataclasses.replace(CONFIG.actor, swap_policy=policy))
    learner, actor = run_actor(open_store(str(tmp_path)), script, config=config)
    progress = actor.progress()
    for row in learner.trajectories:
        for version in np.unique(row.token_policy_version[row.loss_mask]).tolist():
            mine = row.token_policy_version == version
            expected = expected_logprobs(weights(version), row.tokens, config.algorithm.temperature)
            np.testing.assert_allclose(row.behavior_logprobs[mine], expected[mine], atol=2e-5)
    assert progress["swaps"] >= 2
    assert progress["compilations_after_warmup"] == 0


def test_a_signal_writes_what_is_complete(tmp_path) -> None:
    store = open_store(str(tmp_path))
    interrupted = threading.Event()
    ended = threading.Event()

    def script(learner: ScriptedLearner) -> bool:
        if len(learner.groups()) >= 5:
            interrupted.set()
        # The learner goes on until the writer is closed, so that its stop is not what ends the actor.
        ended.set() if any(writer.closed for writer in read_writers(store)) else None
        return ended.is_set()

    with pytest.raises(Interrupted):
        run_actor(store, script, interrupted=interrupted)
    (writer,) = read_writers(store)
    assert writer.closed
    assert writer.next_sequence >= 1
    blocks = [read_json(store, key) for key in store.list_after("tasks/0")]
    assert any(not block["finished"] for block in blocks), "what was under way is not done"


def test_another_life_takes_up_the_blocks_left_behind(tmp_path) -> None:
    store = open_store(str(tmp_path))
    for life in range(2):
        interrupted = threading.Event()

        def script(learner: ScriptedLearner, life: int = life, interrupted: threading.Event = interrupted) -> bool:
            own = [g for g in learner.groups().values() if g[0].incarnation == learner.incarnation]
            if len(own) >= 5:
                interrupted.set()
            return sum(writer.closed for writer in read_writers(store)) > life

        with pytest.raises(Interrupted):
            run_actor(store, script, interrupted=interrupted)
        store.delete("control/stop.json")
    claims = [read_json(store, key)["claims"] for key in store.list_after("tasks/0")]
    assert max(claims) == 2, "the second life reclaims what the first had not finished"
