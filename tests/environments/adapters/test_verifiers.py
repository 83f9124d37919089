from __future__ import annotations

import asyncio
import re
import threading

import pytest

from tests.environments.adapters.support import made, play_all
from tunix_core.environment_config import Table, VerifiersOptions
from tunix_core.environments import task_seed
from tunix_core.environments.adapters.verifiers import load_tasks
from tunix_core.errors import ConfigError, EnvironmentFailure


def options(kind: str = "sums", **fields: object) -> VerifiersOptions:
    return VerifiersOptions(taskset=kind, **fields)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"taskset": ""}, "an installed taskset"),
        ({"config": Table(id="other")}, r"environment\.options\.config\.id"),
        ({"config": Table(system_prompt="/etc/hostname")}, r"config\.system_prompt"),
        ({"config": Table(task={"rewards": {"x": {"fn": "os.system"}}})}, r"config\.fn"),
        ({"config": Table(task={"judges": [{"id": "antigravity"}]})}, r"config\.judges"),
        ({"config": Table(task={"graders": [{"id": "antigravity"}]})}, r"config\.id"),
    ],
)
def test_a_configuration_names_no_code_and_no_file(fields: dict, match: str) -> None:
    """These are what verifiers itself would import or read."""
    with pytest.raises(ConfigError, match=match):
        VerifiersOptions(**{"taskset": "sums", **fields})


@pytest.fixture(autouse=True)
def _tasksets(request: pytest.FixtureRequest) -> None:
    if "fields" not in request.fixturenames:
        pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
        request.getfixturevalue("tasksets")


def test_its_own_rewards_and_metrics_score_the_answer() -> None:
    environment = made("verifiers", options())
    seed = task_seed("train", 0, 0)

    async def go():
        first = await environment.reset(seed)
        total = sum(map(int, re.findall(r"\d+", first.text)))
        # Equal, but not written alike: the package's mathematics decides; and too long for the second reward.
        result = await environment.step(rf"The sum is, I think, \boxed{{{total}.0}}")
        await environment.close()
        return first, result

    first, result = asyncio.run(go())
    assert first.instructions == "Box the answer."
    assert (result.reward, result.done) == (0.75, True)
    assert result.components == {"right": 0.75, "short": 0.0, "prompt_messages": 2.0}
    trace = environment._trace
    assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
    assert trace.info == {"finalized": True}
    assert (trace.ok, trace.stop_condition, trace.num_turns) == (True, "agent_completed", 1)


def test_a_wrong_answer_earns_what_the_rubric_says() -> None:
    _, (result,) = play_all(made("verifiers", options()), task_seed("train", 0, 0), r"\boxed{-1}")
    assert (result.reward, result.done) == (0.25, True)


def test_the_splits_share_no_task_and_configurations_reach_the_taskset() -> None:
    tasks = load_tasks(options(config=Table(num_tasks=40), held_out_one_in=4))
    names = {split: {task.data.name for task in found} for split, found in tasks.items()}
    assert names["train"] | names["held_out"] == {f"sum {i}" for i in range(40)}
    assert not names["train"] & names["held_out"]
    assert 3 < len(names["held_out"]) < 20


def test_an_endless_taskset_is_read_so_far() -> None:
    tasks = load_tasks(options("endless", max_scanned_tasks=30))
    assert sum(map(len, tasks.values())) == 30


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (options("boxed"), "tests_pass takes a runtime"),
        (options("contained"), "it runs in a container"),
        (options("user_first"), "its user speaks first"),
        (options("with_tools"), "a taskset without tool servers"),
        (options("sum_task"), "subclass of verifiers.v1.Taskset"),
        (options("no_class"), "an entry point that can be imported, unlike .*:NoClass"),
        (options("nothing"), "accepted boxed, contained, .*tunix_airflow.verifiers_tasksets"),
        # As verifiers itself would find it: any module's class, and any module.
        (options("tests.environments.adapters.verifiers_tasks:Sums"), "tunix_airflow.verifiers_tasksets"),
        (options("verifiers.v1.tasksets.textarena"), "tunix_airflow.verifiers_tasksets"),
        (options(config=Table(no_such=1)), "environment.options.config"),
    ],
)
def test_what_cannot_be_played_or_scored_is_refused(given: VerifiersOptions, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_tasks(given)


def test_prompts_with_an_assistants_turn_and_empty_splits_cost_the_episode() -> None:
    with pytest.raises(EnvironmentFailure, match="'assistant'"):
        play_all(made("verifiers", options("conversations")), task_seed("train", 0, 0))
    few = options(config=Table(num_tasks=1), held_out_one_in=1000)
    with pytest.raises(EnvironmentFailure, match="held_out_one_in"):
        play_all(made("verifiers", few), task_seed("held_out", 0, 0))


def test_rewards_are_not_computed_where_they_would_be_wrong() -> None:
    """In another thread the mathematics scores 0, without a word."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            play_all(made("verifiers", options()), task_seed("train", 0, 0), r"\boxed{1}")
        except EnvironmentFailure as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(failures[0])
