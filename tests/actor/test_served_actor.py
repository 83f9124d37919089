"""Whole actors on a server: weights are published, reloaded and spoken with, and every token fits its version."""

import dataclasses
import errno
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor
from tests.actor.support import MODEL, expected_logprobs, weights
from tests.support.server_process import ServerProcess
from tunix_core.actor.engines import FolderLoader, own_urls
from tunix_core.config import ActorConfig, RunConfig
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import EngineUnavailable, Interrupted
from tunix_core.models.parameters import flatten_parameters
from tunix_core.processes import free_port
from tunix_core.storage import multifile
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import open_store


def served(server: ServerProcess | None, tmp_path, *, policy: str = "turn", **fields) -> RunConfig:
    """The scripted configuration with its engine on the server."""
    engine = EngineConfig(
        kind="openai",
        base_urls=(server.url if server else f"http://127.0.0.1:{free_port()}",),
        weights_folder=str(tmp_path / "weights"),
        weights_dtype="float32",
        first_retry_seconds=0.02,
        last_retry_seconds=0.2,
        **fields,
    )
    actor = dataclasses.replace(CONFIG.actor, num_groups=1, swap_policy=policy)
    return dataclasses.replace(CONFIG, engine=engine, actor=actor)


@pytest.mark.parametrize(("dialect", "policy"), [("vllm", "turn"), ("sglang", "immediate")])
def test_trajectories_fit_their_versions_over_reloads_and_faults(
    tmp_path, policy_server: ServerProcess, dialect: str, policy: str
) -> None:
    policy_server.faults()
    spoiled = []

    def script(learner: ScriptedLearner) -> bool:
        if learner.trajectories and not spoiled:
            spoiled.append(policy_server.faults(status=[503, 5, 0.1], lengths=2, reset=2))
        newest = max((row.policy_version_max for row in learner.trajectories), default=-1)
        if newest == 0:
            learner.publish(1, 1)
        elif newest == 1 and learner.newest == 1 and spent(learner):  # a restart forgets the other faults
            policy_server.faults(restart=0.2)
            learner.publish(2, 2)
        return newest == 2 and len(learner.groups()) >= 10

    learner, actor = run_actor(
        open_store(str(tmp_path / "run")),
        script,
        config=served(policy_server, tmp_path, policy=policy, dialect=dialect),
    )
    for row in learner.trajectories:
        for version in set(row.token_policy_version[row.loss_mask].tolist()):
            mine = row.loss_mask & (row.token_policy_version == version)
            expected = expected_logprobs(weights(version), row.tokens, CONFIG.algorithm.temperature)
            np.testing.assert_allclose(row.behavior_logprobs[mine], expected[mine], atol=2e-5)
    assert {row.policy_version_max for row in learner.trajectories} == {0, 1, 2}
    progress = actor.progress()
    assert set(progress["failures"]) <= {"engine_malformed_answer"}
    assert progress["failed_attempts"] <= 2
    assert 0 < progress["engine_overloads"] + progress["failed_attempts"] <= 7
    assert progress["num_alarms"] == 0
    assert progress["swaps"] == 2
    beat = read_heartbeat(learner.store, "actor-0-0")
    assert beat is not None
    assert beat.progress["engine_servers_up"] == 1


def spent(learner: ScriptedLearner) -> bool:
    """Whether faults have struck; some may strike a probe of the server instead of a turn."""
    beat = read_heartbeat(learner.store, "actor-0-0")
    return beat is not None and beat.progress["engine_overloads"] + beat.progress["failed_attempts"] > 0


def seconds(number: float):
    """A script that ends after so long."""
    started = time.monotonic()
    return lambda _learner: time.monotonic() - started > number


def test_an_actor_without_a_server_ends_to_be_started_again(tmp_path) -> None:
    with pytest.raises(EngineUnavailable):
        run_actor(
            open_store(str(tmp_path / "run")),
            seconds(2.0),
            config=served(None, tmp_path, gone_after_seconds=0.2),
        )


def test_an_actor_that_waits_for_its_server_can_be_stopped(tmp_path) -> None:
    interrupted = threading.Event()
    threading.Timer(0.5, interrupted.set).start()
    with pytest.raises(Interrupted):
        run_actor(
            open_store(str(tmp_path / "run")),
            seconds(2.0),
            config=served(None, tmp_path),
            interrupted=interrupted,
        )


def test_versions_are_handed_over_in_folders_that_do_not_pile_up(tmp_path) -> None:
    store = open_store(str(tmp_path / "run"))
    config = served(None, tmp_path)
    policies = PolicyStore(store)
    for version, seed in enumerate([0, 0, 1, 2]):
        parent = version - 1 if version else None
        tensors = flatten_parameters(weights(seed))
        policies.publish(version, tensors, config={}, parent=parent, publisher="test", gate={})
    (tmp_path / "weights" / "actor-0-0" / "00000007-of-an-earlier-life").mkdir(parents=True)
    loader = FolderLoader(policies, config, "actor-0-0")
    first = loader.load(0)
    first.in_use = True
    second, third = loader.load(1), loader.load(2)
    assert first.digest == second.digest != third.digest
    assert (third.folder / "model.safetensors").is_file()
    assert (third.folder / "config.json").is_file()
    last = loader.load(3)
    assert sorted((tmp_path / "weights" / "actor-0-0").iterdir()) == [first.folder, third.folder, last.folder]


def test_a_version_that_cannot_be_handed_over_leaves_no_half_of_it(tmp_path, monkeypatch) -> None:
    store = open_store(str(tmp_path / "run"))
    policies = PolicyStore(store)
    policies.publish(0, flatten_parameters(weights(0)), config={}, parent=None, publisher="test", gate={})
    loader = FolderLoader(policies, served(None, tmp_path), "actor-0-0")

    def full(*_arguments: Any, **_fields: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(multifile, "encode_tensors", full)
    with pytest.raises(OSError, match="no space"):
        loader.load(0)
    assert list((tmp_path / "weights" / "actor-0-0").iterdir()) == []


def test_servers_are_dealt_to_actors_in_turn_and_to_none_twice(tmp_path) -> None:
    urls = tuple(f"http://gpu:{port}" for port in range(1, 6))
    engine = EngineConfig(kind="openai", base_urls=urls, weights_folder=str(tmp_path))
    config = RunConfig(recipe="test", model=MODEL, engine=engine, actor=ActorConfig(num_groups=2, replicas=2))
    dealt = [own_urls(config, f"actor-{group}-{replica}") for group in range(2) for replica in range(2)]
    assert dealt == [[urls[0], urls[4]], [urls[1]], [urls[2]], [urls[3]]]
