"""A pytest plugin: which worker runs a file, which files come first, and how long Airflow runs for its tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.airflow_service import ScriptedAirflow, scripted_airflow

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

NEED_AIRFLOW = (
    "tests/airflow/test_evaluate_trajectories.py",
    "tests/airflow/test_main_job.py",
    "tests/airflow/test_post_training.py",
    "tests/conformance/test_no_orphans_after_the_driver_dies.py",
)
"""Files whose tests are marked `airflow`: they share one service, so one worker runs them."""

LONGEST_FIRST = (
    "tests/learner/test_several_hosts.py",
    "tests/tasks/test_fine_tune.py",
    "tests/learner/test_meshes.py",
    "tests/learner/test_kill.py",
    "tests/models/test_attention.py",
    "tests/pretrained/test_smollm2.py",
    "tests/pretrained/test_adapted_run.py",
    "tests/simulation/test_simulate.py",
    "tests/conformance/test_last_evaluation_is_not_lost.py",
)
"""What must not be left to the end, where it would keep one worker busy alone."""

_AIRFLOW = pytest.StashKey[tuple[ScriptedAirflow, contextlib.ExitStack]]()


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs Airflow first, then what takes longest."""
    for name in (*NEED_AIRFLOW, *LONGEST_FIRST):
        if not (config.rootpath / name).is_file():
            raise pytest.UsageError(f"{name}, named in {__file__}, does not exist")
    for item in items:
        if _needs_airflow(item) and _file(item.nodeid) not in NEED_AIRFLOW:
            raise pytest.UsageError(f"{item.nodeid} is marked airflow: add its file to NEED_AIRFLOW in {__file__}")
    order = {name: number for number, name in enumerate((*NEED_AIRFLOW, *LONGEST_FIRST))}
    items.sort(key=lambda item: order.get(_file(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Files go whole to a worker, in the order of collection, and all that needs Airflow to one.

    xdist's own way, the marker `xdist_group`, does nothing under pytest 9.2: it writes a node's id where pytest no
    longer reads it.
    """
    from xdist.scheduler import LoadFileScheduling  # not where tests run without xdist

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = _file(nodeid)
            return "airflow" if name in NEED_AIRFLOW else name

    config.option.loadscopereorder = False  # by number of tests
    return WholeFiles(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """An Airflow that nothing asks any more takes a tenth of a core from the tests that follow."""
    if nextitem is None or not _needs_airflow(nextitem):
        _stop_airflow(item.session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Also where Ctrl-C kept a test from its teardown."""
    _stop_airflow(session)


def airflow_of(session: pytest.Session, folders: pytest.TempPathFactory) -> ScriptedAirflow:
    """The one that runs, or a new one."""
    if _AIRFLOW not in session.stash:
        stack = contextlib.ExitStack()
        service = stack.enter_context(contextlib.contextmanager(scripted_airflow)(folders.mktemp("airflow")))
        session.stash[_AIRFLOW] = service, stack
    return session.stash[_AIRFLOW][0]


def _stop_airflow(session: pytest.Session) -> None:
    if _AIRFLOW in session.stash:
        _, stack = session.stash[_AIRFLOW]
        del session.stash[_AIRFLOW]
        stack.close()


def _needs_airflow(item: pytest.Item) -> bool:
    return item.get_closest_marker("airflow") is not None
