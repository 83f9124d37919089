"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.airflow_service import ScriptedAirflow, scripted_airflow


@pytest.fixture(scope="session")
def scripted_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedAirflow]:
    """One real Airflow for the whole session; starts when the first test asks for it."""
    yield from scripted_airflow(tmp_path_factory.mktemp("airflow"))
