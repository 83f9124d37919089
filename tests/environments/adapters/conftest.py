from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.environments.adapters.support import openenv_server
from tunix_core import environment_config


@pytest.fixture(scope="session")
def openenv_url() -> Iterator[str]:
    with openenv_server() as (url, _):
        yield url


Offer = Callable[[str, Mapping[str, str]], Path]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Installs a package with entry points of a group, into a folder on the path; gives the folder."""

    def install(group: str, values: Mapping[str, str]) -> Path:
        metadata = tmp_path / "offered-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in values.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        environment_config.installed.cache_clear()
        return tmp_path

    yield install
    environment_config.installed.cache_clear()


@pytest.fixture
def tasksets(offer: Offer) -> None:
    """Those of `verifiers_tasks`."""
    kinds = {
        "sums": "Sums",
        "endless": "EndlessSums",
        "boxed": "Boxed",
        "contained": "Contained",
        "user_first": "UserFirst",
        "with_tools": "WithTools",
        "conversations": "Conversations",
        "sum_task": "SumTask",
        "no_class": "NoClass",
    }
    module = "tests.environments.adapters.verifiers_tasks"
    offer(environment_config.TASKSET_ENTRY_POINTS, {name: f"{module}:{kind}" for name, kind in kinds.items()})
