from collections.abc import Iterator

import pytest

from tests.environments.adapters.support import openenv_server


@pytest.fixture(scope="session")
def openenv_url() -> Iterator[str]:
    with openenv_server() as (url, _):
        yield url
