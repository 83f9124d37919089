import asyncio
import random

import pytest

from tests.environments.adapters.support import made, play_all
from tunix_core.environment_config import EnvironmentConfig, ReasoningGymOptions, Table
from tunix_core.environments import task_seed
from tunix_core.environments.adapters.messages import extract, how_to
from tunix_core.errors import ConfigError, EnvironmentFailure

QUICK = ("chain_sum", "gcd", "count_bits")


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        ("tags", "<answer>1</answer> no: <answer> 2\n</answer>.", "2"),
        ("tags", "<answer></answer>", None),
        ("tags", "2", None),
        ("last_line", "first\n 2 \n\n", "2"),
        ("last_line", " \n", None),
        ("message", " 1\n2 ", "1\n2"),
        ("message", "", None),
    ],
)
def test_what_of_a_message_is_the_answer(kind: str, message: str, found: str | None) -> None:
    assert extract(message, kind, "answer") == found


def test_where_to_write_is_a_sentence() -> None:
    what = "the answer, as asked for,"
    assert [how_to(kind, "answer", what) for kind in ("tags", "last_line", "message")] == [
        "Think first, then write the answer, as asked for, between <answer> and </answer>.",
        "Think first, then write only the answer, as asked for, in the last line.",
        "Write only the answer, as asked for.",
    ]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"datasets": Table()}, "datasets"),
        ({"datasets": Table(gcd=0)}, "above 0"),
        ({"dataset_configs": Table(gcd={})}, "dataset_configs.gcd"),
        ({"dataset_configs": Table(chain_sum={"seed": 3})}, "dataset_configs.chain_sum"),
        ({"answer": "boxed"}, "answer"),
        ({"splits": "none"}, "splits"),
    ],
)
def test_options_are_checked_without_the_package(options: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReasoningGymOptions(**options)


@pytest.fixture
def datasets():
    return pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed").factory.DATASETS


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"datasets": Table(sums=1)}, "sums"),
        ({"datasets": Table(composite=1)}, "composite"),
        ({"datasets": Table(game_of_life_halting=1)}, "tells right from wrong"),
        ({"dataset_configs": Table(chain_sum={"min_turns": 3})}, "min_terms"),
        ({"datasets": Table(word_ladder=1)}, "PYTHONHASHSEED"),
    ],
)
def test_what_the_package_does_not_take_is_refused(options: dict, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=match):
        made("reasoning_gym", ReasoningGymOptions(**options))


@pytest.mark.usefixtures("datasets")
def test_datasets_are_drawn_by_weight_with_their_own_fields() -> None:
    options = ReasoningGymOptions(
        datasets=Table(chain_sum=3.0, gcd=1), dataset_configs=Table(chain_sum={"min_terms": 2, "max_terms": 2})
    )
    environment = made("reasoning_gym", options)
    kinds = []
    for index in range(200):
        instance = environment.instance(task_seed("train", index, 0))
        kinds.append(instance.entry["metadata"]["source_dataset"])
        if kinds[-1] == "chain_sum":
            assert instance.entry["metadata"]["num_terms"] == 2
    assert set(kinds) == {"chain_sum", "gcd"}
    assert 120 < kinds.count("chain_sum") < 180


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize("name", QUICK)
def test_the_splits_share_no_question(name: str) -> None:
    environment = made("reasoning_gym", ReasoningGymOptions(datasets=Table({name: 1.0})))
    train, held_out = (
        {environment.instance(task_seed(split, index, 0)).question for index in range(60)}
        for split in ("train", "held_out")
    )
    assert len(train) > 20
    assert len(held_out) > 10
    assert not train & held_out


@pytest.mark.usefixtures("datasets")
def test_too_few_instances_for_a_split_end_the_search() -> None:
    # One question in all: one split has it, the other has nothing.
    options = ReasoningGymOptions(
        datasets=Table(coin_flip=1.0), dataset_configs=Table(coin_flip={"min_trials": 1, "max_trials": 1})
    )
    environment = made("reasoning_gym", options)
    only = ReasoningGymOptions(datasets=options.datasets, dataset_configs=options.dataset_configs, splits="seed")
    draw = random.Random(0)
    question = environment._draw(draw)
    environment._draw = lambda _rng: question  # as if it were the only one
    failed = []
    for split in ("train", "held_out"):
        try:
            environment.instance(task_seed(split, 0, 0))
        except EnvironmentFailure as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert "splits to seed" in failed[0]
    assert made("reasoning_gym", only).instance(task_seed("held_out", 0, 0)).question


@pytest.mark.usefixtures("datasets")
def test_partial_credit_is_a_choice() -> None:
    seed = task_seed("train", 0, 0)
    rewards = {}
    for partial in (True, False):
        environment = made("reasoning_gym", ReasoningGymOptions(partial_credit=partial))
        answer = environment.instance(seed).entry["answer"]
        _, (result,) = play_all(environment, seed, f"<answer>about {answer}</answer>")
        rewards[partial] = result.reward
        assert 0 < result.components["answer"] < 1
    assert 0 < rewards[True] < 1
    assert rewards[False] == 0


@pytest.mark.usefixtures("datasets")
def test_an_answer_that_the_dataset_cannot_read_is_wrong_and_counted() -> None:
    environment = made("reasoning_gym", ReasoningGymOptions(datasets=Table(prime_factorization=1.0)))
    _, (result,) = play_all(environment, task_seed("train", 0, 0), "<answer>none</answer>")
    assert (result.reward, result.done, result.components["malformed_calls"]) == (0.0, True, 1.0)


@pytest.mark.usefixtures("datasets")
def test_it_is_opened_as_reset_does() -> None:
    environment = made("reasoning_gym", ReasoningGymOptions())
    seed = task_seed("held_out", 3, 0)
    first, _ = play_all(environment, seed, environment.demonstration(seed)[1][1])
    assert environment.opening(seed) == first


@pytest.mark.usefixtures("datasets")
def test_a_dataset_without_answers_has_no_demonstration() -> None:
    environment = made("reasoning_gym", ReasoningGymOptions(datasets=Table(graph_color=1.0)))
    with pytest.raises(ConfigError, match="reference answers"):
        environment.demonstration(task_seed("train", 0, 0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_dataset_asks_and_scores_its_own_answer(datasets: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other; all but the three whose questions take over 5 s each to make here."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    without_answers = set()
    left_out = {"composite", "game_of_life_halting", "knight_swap", "intermediate_integration", "arc_agi"}
    for name in sorted(set(datasets) - left_out):
        options = ReasoningGymOptions(datasets=Table({name: 1.0}), splits="seed", answer="message")
        environment = made("reasoning_gym", options)
        seed = task_seed("train", 3, 0)
        try:
            script = environment.demonstration(seed)
        except ConfigError:
            without_answers.add(name)
            script = [("prompt", ""), ("policy", "0")]
        first, (result,) = play_all(environment, seed, script[1][1])
        assert first.text, name
        assert result.done, name
        assert result.reward == 1.0 or name in without_answers, name
        _, (result,) = play_all(made("reasoning_gym", options), seed, "no answer at all")
        assert result.reward < 1, name
    assert without_answers == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.mark.usefixtures("datasets")
def test_injected_faults_strike_its_steps() -> None:
    from tunix_core.environments import make_environment

    config = EnvironmentConfig(name="reasoning_gym", failure_probability=1.0, latency_mean_seconds=0.0)

    async def go() -> None:
        environment = make_environment(config)
        await environment.reset(task_seed("train", 0, 0))
        with pytest.raises(EnvironmentFailure, match="injected"):
            await environment.step("<answer>1</answer>")
        await environment.close()

    asyncio.run(go())
