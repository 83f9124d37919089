"""What only `gs://` has: retries, lost answers, pages."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.gcs import Emulator, environment
from tunix_core.console.emulator import emulator_environment
from tunix_core.errors import ObjectExists, StoreError, VersionConflict
from tunix_core.storage.store import ObjectStore, open_store

_ROOT = Path(__file__).parents[2]
_COUNTER = itertools.count()


class _Script:
    """Applies the actions to the first uploads (POST); everything else passes."""

    def __init__(self) -> None:
        self.uploads: list[Fault] = []
        self.gets: list[Fault] = []

    def __call__(self, method: str, _path: str) -> Fault:
        waiting = self.uploads if method == "POST" else self.gets
        return waiting.pop(0) if waiting else "pass"


@pytest.fixture
def flaky(gcs: Emulator) -> Iterator[tuple[ObjectStore, _Script, FaultProxy]]:
    script = _Script()
    proxy = FaultProxy(gcs.url, script)
    try:
        with environment(emulator_environment(proxy.url)):
            yield open_store(f"{gcs.uri}/flaky-{next(_COUNTER)}"), script, proxy
    finally:
        proxy.stop()


Flaky = tuple[ObjectStore, _Script, FaultProxy]


def test_a_refused_request_is_repeated(flaky: Flaky) -> None:
    store, script, _ = flaky
    script.uploads[:] = ["503"]
    script.gets[:] = ["503"]
    data = b"x" * (2 * 2**20)  # large bodies are streamed, and a retry must send them whole again
    store.put_if_absent("k", data)
    assert store.get("k") == data


def test_a_creation_whose_answer_was_lost_is_not_taken_for_a_rival(flaky: Flaky) -> None:
    store, script, proxy = flaky
    script.uploads[:] = ["lose_503"]
    version = store.put_if_absent("k", b"1")
    assert [action for method, _, action in proxy.requests if method == "POST"] == ["lose_503", "pass"]
    assert store.get_with_version("k") == (b"1", version)


def test_a_swap_whose_answer_was_lost_is_not_taken_for_a_rival(flaky: Flaky) -> None:
    store, script, _ = flaky
    version = store.put_if_absent("k", b"1")
    script.uploads[:] = ["lose_503"]
    new = store.put_if_version("k", b"2", version)
    assert store.get_with_version("k") == (b"2", new)
    with pytest.raises(VersionConflict):
        store.put_if_version("k", b"3", version)


def test_a_rival_with_equal_bytes_is_a_rival(flaky: Flaky) -> None:
    store, script, _ = flaky
    store.put_if_absent("k", b"1")
    script.uploads[:] = ["503"]
    with pytest.raises(ObjectExists):
        store.put_if_absent("k", b"1")


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("k"),
        lambda store: store.exists("k"),
        lambda store: store.list_after(""),
        lambda store: store.delete("k"),
    ],
)
def test_a_denied_request_is_a_store_error_at_once(flaky: Flaky, act: Callable[[ObjectStore], object]) -> None:
    store, script, proxy = flaky
    script.gets[:] = ["403"]
    with pytest.raises(StoreError, match="Forbidden"):
        act(store)
    assert len(proxy.requests) == 1


def test_a_poll_lists_only_what_is_new(flaky: Flaky) -> None:
    store, _, proxy = flaky
    for i in range(5):
        store.put(f"a/{i}", b"")
    proxy.requests.clear()
    assert store.list_after("a/", "a/3") == ["a/4"]
    (request,) = proxy.requests
    assert "startOffset=" in request[1]


@pytest.mark.usefixtures("gcs")
def test_a_bucket_that_is_not_there() -> None:
    store = open_store("gs://no-such-bucket/run")
    with pytest.raises(StoreError):
        store.put_if_absent("k", b"")
    with pytest.raises(StoreError):
        store.get("k")


def test_importing_storage_imports_no_client() -> None:
    code = (
        "import sys, tunix_core.storage, tunix_core.storage.store, tunix_core.storage.control, "
        "tunix_core.storage.policies, tunix_core.storage.run_directory, tunix_core.storage.task_blocks\n"
        "tunix_core.storage.store.open_store('/tmp/x')\n"
        "heavy = {'gcsfs', 'aiohttp', 'jax', 'safetensors', 'google'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
