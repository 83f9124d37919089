import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments.support import config, made, play
from tunix_core import environment_config
from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict, config_to_dict, load_recipe
from tunix_core.environment_config import (
    OPTIONS,
    CalculatorOptions,
    EnvironmentConfig,
    EnvironmentOptions,
    FilesOptions,
    LookupOptions,
    PythonOptions,
    SqlOptions,
    Table,
)
from tunix_core.environments import FACTORIES, demonstrated, make_environment, split_of, task_seed
from tunix_core.environments.base import ToolWeather
from tunix_core.errors import ConfigError, EnvironmentFailure
from tunix_core.tools.formats import FORMATS

NAMES = ("lookup", "calculator")
ALL = (*NAMES, "python", "sql", "files")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ALL)
def test_a_demonstration_earns_the_reward(name: str, form: str) -> None:
    environment = made(name, tool_format=form)
    for index in range(5):
        seed = task_seed("train", index, 0)
        script = environment.demonstration(seed)
        first, results = play(environment, seed, [text for role, text in script if role == "policy"])
        assert script[0] == ("prompt", first.text)
        assert first == environment.opening(seed)
        assert bool(first.tools) == (form != "plain")
        assert [result.text for result in results[:-1]] == [text for _, text in script[2::2]]
        assert [result.role for result in results[:-1]] == [role for role, _ in script[2::2]]
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].reward == 1.0
        assert results[-1].components["malformed_calls"] == results[-1].components["failed_calls"] == 0
        assert results[-1].components["tool_calls"] == len(results) - 1
        assert all(result.reward == 0 for result in results[:-1])
        assert all(set(result.components) == set(results[-1].components) for result in results)
        assert {result.role for result in results[:-1]} == {"user" if form == "hermes" else "tool"}


@pytest.mark.parametrize("name", ALL)
def test_splits_share_no_instance(name: str) -> None:
    environment = made(name)
    tasks = {
        split: {environment.task(task_seed(split, index, 3)) for index in range(200)} for split in ("train", "held_out")
    }
    assert not tasks["train"] & tasks["held_out"]
    # Endless: hardly one comes twice. Two keys and three digits are as many lookups as there are.
    assert len(tasks["train"]) > 190


@pytest.mark.parametrize(("name", "digest"), [("lookup", "1c8cf9475b26a6e0"), ("calculator", "30b01943386a790a")])
def test_texts_that_recipes_of_small_policies_depend_on(name: str, digest: str) -> None:
    """Prompts, demonstrations and answers to right and wrong messages, to the byte: a byte-level policy learns them."""
    seen: list[object] = []
    environment = made(name)
    for index in range(100):
        for split in ("train", "held_out"):
            seed = task_seed(split, index, 0)
            script = environment.demonstration(seed)
            messages = ["get z", "get", "calc 1/0", "calc 12*34", "x", "= "]
            first, results = play(environment, seed, [*messages, *(text for role, text in script if role == "policy")])
            names = ("answer", "malformed_calls", "tool_calls")
            lines: list[object] = [[first.text, first.instructions, list(first.tools)]]
            for r in results:
                calls = [list(call) for call in r.tool_calls]
                lines.append([r.text, r.reward, r.done, calls, {n: r.components[n] for n in names}, r.truncated])
            seen += [script, lines]
    assert hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["", "get", "get  c", "calc 1+", "calc 1/0", "get<pad> c", "= ", "=483", "\x00", "9" * 50]
)
def test_a_malformed_call_is_an_observation(name: str, text: str) -> None:
    _, results = play(made(name), 4, [text, text])
    assert [result.text for result in results] == ["?", "?"]
    assert not results[1].done
    assert not results[1].tool_calls
    assert results[1].components["malformed_calls"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_ends_the_episode_without_reward(name: str) -> None:
    environment = made(name)
    answer = environment.demonstration(4)[-1][1]
    _, (result,) = play(environment, 4, [answer + "0"])
    assert (result.done, result.reward) == (True, 0.0)


def test_an_unknown_key_is_a_failed_tool_call() -> None:
    environment = made("lookup")
    used = {text[-1] for role, text in environment.demonstration(4) if text.startswith("get")}
    other = next(key for key in "abcdefgh" if key not in used)
    _, (result,) = play(environment, 4, [f"get {other}"])
    assert (result.text, result.tool_calls) == ("?", (("get", False),))
    assert result.components["malformed_calls"] == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lookup", LookupOptions(num_digits=1, num_keys=3)),
        ("calculator", CalculatorOptions(num_digits=1)),
        ("python", PythonOptions(max_operations=1, num_examples=0)),
        ("sql", SqlOptions(num_rows=12)),
        ("files", FilesOptions(num_files=2, num_changes=1)),
    ],
)
def test_options_are_used_and_the_smallest_have_instances_of_both_splits(
    name: str, options: EnvironmentOptions
) -> None:
    environment = made(name, options=options)
    tasks = {
        split: {environment.task(task_seed(split, index, 3)) for index in range(200)} for split in ("train", "held_out")
    }
    assert tasks["train"]
    assert tasks["held_out"]
    assert not tasks["train"] & tasks["held_out"]
    # The instance of sql does not hold its rows.
    assert name == "sql" or tasks["train"] != {made(name).task(task_seed("train", index, 3)) for index in range(200)}


def test_task_seeds_are_stable_and_distinct() -> None:
    seeds = {task_seed(split, index, run) for split in ("train", "held_out") for index in range(100) for run in (0, 1)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert task_seed("held_out", 7, 1) == 6327693230831148449
    assert split_of(task_seed("held_out", 7, 1)) == "held_out"
    assert split_of(task_seed("train", 7, 1)) == "train"
    with pytest.raises(ConfigError, match="split"):
        task_seed("test", 0, 0)


def test_injected_latency_has_the_configured_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def record(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    weather = ToolWeather(config("lookup", latency_mean_seconds=0.2, latency_sigma=0.5), 1, latency=True)

    async def go() -> None:
        for _ in range(4000):
            await weather.call()

    asyncio.run(go())
    assert sum(slept) / len(slept) == pytest.approx(0.2, rel=0.05)
    assert len(set(slept)) > 3000


def test_faults_strike_with_the_configured_probability_and_repeat_by_seed() -> None:
    def strikes(seed: int) -> list[bool]:
        weather = ToolWeather(config("lookup", failure_probability=0.1), seed, latency=False)

        async def go() -> list[bool]:
            found = []
            for _ in range(1000):
                try:
                    await weather.call()
                    found.append(False)
                except EnvironmentFailure:
                    found.append(True)
            return found

        return asyncio.run(go())

    assert strikes(1) == strikes(1) != strikes(2)
    assert 60 < sum(strikes(1)) < 140


# ---- configuration ------------------------------------------------------------------------------


def test_every_name_has_options_and_a_factory() -> None:
    assert OPTIONS.keys() == FACTORIES.keys()
    for name in ALL:
        assert type(EnvironmentConfig(name=name).options) is OPTIONS[name]


def recipe(**overrides: object) -> RunConfig:
    return load_recipe("lookup", {f"environment.{key.replace('__', '.')}": value for key, value in overrides.items()})


def test_options_follow_the_name() -> None:
    resolved = recipe(name="sql", options__num_rows=20)
    assert resolved.environment.options == SqlOptions(num_rows=20)
    assert config_from_dict(config_to_dict(resolved)) == resolved
    assert load_recipe("calculator").environment.options == CalculatorOptions(num_digits=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"options__num_rows": 20}, r"environment\.options\.num_rows: received 20, accepted num_digits, num_keys"),
        (
            {"name": "sql", "options__num_keys": 4},
            r"environment\.options\.num_keys: received 4, accepted max_result_rows",
        ),
        ({"options__num_keys": 99}, r"environment\.options\.num_keys: received 99, accepted 3 to 26"),
        ({"options__num_keys": "4"}, r"environment\.options\.num_keys: received '4', accepted a value of type int"),
        ({"options": 3}, r"environment\.options: received 3, accepted a table"),
        ({"num_digits": 3}, r"environment\.num_digits: received 3, accepted .*options"),
        ({"name": "../x"}, r"environment\.name: received '\.\./x'"),
        ({"name": "os:system"}, r"environment\.name: received 'os:system'"),
        (
            {"name": "chess"},
            r"environment\.name: received 'chess', accepted lookup, calculator, python, sql, files.*group",
        ),
        (
            {"name": "python", "timeout_seconds": 4},
            r"environment\.timeout_seconds: received 4\.0, accepted above 4, which scoring",
        ),
        (
            {"name": "sql", "options__query_seconds": 5},
            r"environment\.timeout_seconds: received 10\.0, accepted above 10",
        ),
        ({"tool_format": "xml"}, r"environment\.tool_format: received 'xml', accepted plain, hermes, llama3"),
    ],
)
def test_wrong_options_are_refused_with_what_is_accepted(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**overrides)


def test_options_of_another_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"accepted SqlOptions with environment\.name = sql"):
        dataclasses.replace(EnvironmentConfig(), name="sql")


# ---- installed environments ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChessOptions(EnvironmentOptions):
    depth: int = 3
    opening: Table = dataclasses.field(default_factory=Table)

    def __post_init__(self) -> None:
        if self.depth > 9:
            raise ConfigError("environment.options.depth", self.depth, "0 to 9", "Lower it.")


class Chess:
    options_type = ChessOptions

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self.made_with = (config.options, latency, weather_seed)


def without_options(config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> str:
    return f"{type(config.options).__name__} {latency} {weather_seed}"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        name: importlib.metadata.EntryPoint(name, f"{__name__}:{target}", environment_config.ENTRY_POINTS)
        for name, target in {"chess": "Chess", "go": "without_options", "broken": "nothing"}.items()
    }
    monkeypatch.setattr(environment_config, "installed", {environment_config.ENTRY_POINTS: entries}.__getitem__)


@pytest.mark.usefixtures("_installed")
def test_an_installed_environment_is_made_by_its_name() -> None:
    resolved = recipe(name="chess", options__depth=4, options__opening={"moves": ["e4"]})
    saved = config_to_dict(resolved)
    assert saved["environment"]["options"] == {"depth": 4, "opening": {"moves": ["e4"]}}
    assert config_from_dict(saved) == resolved
    environment = make_environment(resolved.environment, latency=False, weather_seed=5)
    assert environment.made_with == (ChessOptions(depth=4, opening=Table(moves=["e4"])), False, 5)  # type: ignore[attr-defined]
    assert recipe(name="chess").environment.options == Table(depth=3, opening={})
    assert make_environment(recipe(name="go").environment) == "EnvironmentOptions True 0"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "chess", "options__width": 4}, r"environment\.options\.width: received 4, accepted depth, opening"),
        ({"name": "chess", "options__depth": 10}, r"environment\.options\.depth: received 10"),
        (
            {"name": "chess", "options__opening": {"x": float("nan")}},
            r"environment\.options: received .* accepted text, finite numbers",
        ),
        ({"name": "go", "options__depth": 1}, r"environment\.options\.depth"),
        ({"name": "shogi"}, "accepted lookup, calculator, python, sql, files.*, broken, chess, go"),
        ({"name": "broken"}, "an entry point that can be imported"),
    ],
)
def test_wrong_names_and_options_of_installed_ones_are_refused(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**overrides)


@pytest.mark.usefixtures("_installed")
def test_a_run_is_read_where_its_environment_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = config_to_dict(recipe(name="chess"))
    monkeypatch.setattr(environment_config, "installed", lambda _group: {})
    read = config_from_dict(saved)
    with pytest.raises(ConfigError, match="install the package that offers it"):
        make_environment(read.environment)


def test_entry_points_are_found_by_group_and_two_of_one_name_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = environment_config.ENTRY_POINTS
    first, second = (importlib.metadata.EntryPoint("chess", f"package:{x}", group) for x in "ab")
    found = {group: [first]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found[group])
    look = environment_config.installed.__wrapped__
    assert look(group) == {"chess": first}
    found[group].append(second)
    with pytest.raises(ConfigError, match="not package:a and package:b"):
        look(group)


# ---- warm starts --------------------------------------------------------------------------------


class Undemonstrated(LookupOptions):
    demonstrated = False


def test_a_warm_start_needs_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "lookup", Undemonstrated)
    with pytest.raises(ConfigError, match=r"start from a policy \(start_uri\), or as the model is"):
        load_recipe("lookup")
    assert load_recipe("lookup", {"warm_start.num_steps": 0}).warm_start.num_steps == 0
    assert load_recipe("lookup", {"start_uri": "runs/a/policies/00000000"}).start_uri


@pytest.mark.usefixtures("_installed")
def test_a_warm_start_with_an_installed_environment_without_demonstrations_is_refused() -> None:
    assert demonstrated(EnvironmentConfig()).opening(4).instructions
    with pytest.raises(ConfigError, match=r"warm_start\.num_steps = 0"):
        demonstrated(recipe(name="chess").environment)


# ---- a package that is really installed ---------------------------------------------------------


def test_a_package_offers_an_environment_by_its_entry_point(tmp_path: Path) -> None:
    """The guide's example, seen by a process of its own through the metadata of an installed package."""
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (source,) = re.findall(r"```python\n(.*?class Stock.*?)```", guide, re.DOTALL)
    (entry,) = re.findall(
        r'\[project.entry-points."(tunix_airflow.environments)"\]\nstock = "my_package.stock:Stock"', guide
    )
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "stock.py").write_text(source)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{entry}]\nstock = my_package.stock:Stock\n")
    command = [sys.executable, "-m", "tunix_core.console.cli", "environment", "stock", "--seed", "3"]
    options = ["--set", "environment.options.num_items=2"]
    process = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]),
    }
    done = subprocess.run([*command, *options], env=process, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "policy       look 2\n" in done.stdout
    assert done.stdout.endswith("reward 1\n")
