"""From configuration to services: a missing package is refused with its remedy; calls as the fakes recorded them.

`FakeWandb` and `FakeMlflow` stand for the packages, which are extras that the test environment does not have.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.learner.support import make_config, make_learner, open_run, write_shards
from tests.sinks.support import FakeMlflow, FakeWandb
from tunix_core.config_loading import config_to_dict
from tunix_core.errors import ConfigError
from tunix_core.sinks.opening import PACKAGES, open_sinks

VARIABLES = ("WANDB_PROJECT", "WANDB_MODE", "MLFLOW_TRACKING_URI")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Make `import name` give these."""
    original = importlib.util.find_spec
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules or original(name))


@pytest.mark.parametrize("sink", sorted(PACKAGES))
def test_a_missing_package_is_refused_at_start_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    store = open_run(tmp_path)
    with pytest.raises(ConfigError, match=rf"observability\.sinks: received '{sink}'.*tunix-airflow\[{sink}\]"):
        make_learner(store, make_config(**{"observability.sinks": [sink]}))
    assert store.list_after("") == []


def test_every_sink_is_an_extra_of_its_name() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for sink, package in PACKAGES.items():
        assert extras["optional-dependencies"][sink][0].startswith(package)


def test_a_learners_run_as_wandb_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, store = FakeWandb(), open_run(tmp_path)
    install(monkeypatch, wandb=wandb)
    write_shards(store, 14)
    config = make_config(**{"observability.sinks": ["wandb"], "observability.local_folder": str(tmp_path / "local")})
    make_learner(store, config).run()
    (init,) = wandb.inits
    assert init["project"] == "tunix-airflow"
    assert (init["name"], init["resume"]) == ("run", "allow")
    assert "mode" not in init, "WANDB_MODE decides"
    assert init["dir"] == str(tmp_path / "local" / "learner-l0" / "wandb")
    assert Path(init["dir"]).is_dir()
    assert init["config"]["learner.num_steps"] == 6
    assert len(init["config"]) == sum(
        len(value) if isinstance(value, dict) else 1 for value in config_to_dict(config).values()
    )
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "model_flops_utilization", "ledger_read"} <= set(wandb.logged[0][1])
    assert wandb.finished == 1
    again = open_sinks(store, config, process="learner", incarnation="l1", log=print)
    again.close()
    assert wandb.inits[1]["id"] == init["id"], "a restarted learner continues the run"


def test_a_learners_run_as_mlflow_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, store = FakeMlflow(), open_run(tmp_path)
    install(monkeypatch, mlflow=mlflow)
    write_shards(store, 14)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    config = make_config(**{"observability.sinks": ["mlflow"]})
    make_learner(store, config).run()
    assert mlflow.runs[0]["experiment_id"] == mlflow.experiments["tunix-airflow"]
    params = [batch["params"] for _, batch in mlflow.batches if "params" in batch]
    assert max(map(len, params)) <= 100
    assert ("learner.num_steps", "6") in [param for batch in params for param in batch]
    losses = [m for _, batch in mlflow.batches for m in batch.get("metrics", []) if m[0] == "loss"]
    assert [step for _, _, step in losses] == [1, 2, 3, 4, 5, 6]
    assert mlflow.terminated == ["r1"]
    open_sinks(store, config, process="learner", incarnation="l1", log=print).close()
    assert mlflow.runs[1]["experiment_id"] == mlflow.runs[0]["experiment_id"]
    assert mlflow.runs[1]["tags"] == mlflow.runs[0]["tags"]


def test_files_without_a_folder_go_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    install(monkeypatch, wandb=wandb)
    config = make_config(**{"observability.sinks": ["wandb"]})
    open_sinks(open_run(tmp_path), config, process="learner", incarnation="l0", log=print).close()
    assert not Path(wandb.inits[0]["dir"]).exists()


@pytest.mark.parametrize(
    ("sink", "mode", "message"),
    [
        ("wandb", "offline", r"observability\.local_folder: received '', accepted an absolute path"),
        ("mlflow", "online", r"observability\.sinks: received 'mlflow', accepted .* MLFLOW_TRACKING_URI"),
    ],
)
def test_what_would_be_lost_with_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, mode: str, message: str
) -> None:
    install(monkeypatch, wandb=FakeWandb(), mlflow=FakeMlflow())
    monkeypatch.setenv("WANDB_MODE", mode)
    config = make_config(**{"observability.sinks": [sink]})
    with pytest.raises(ConfigError, match=message):
        open_sinks(open_run(tmp_path), config, process="learner", incarnation="l0", log=print)
