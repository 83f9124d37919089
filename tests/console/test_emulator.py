from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.gcs import environment
from tunix_core.console.emulator import start_fake_gcs
from tunix_core.storage.store import open_store

_ROOT = Path(__file__).parents[2]


def test_two_emulators_are_apart_and_stop() -> None:
    first, second = start_fake_gcs("first"), start_fake_gcs("second")
    try:
        assert first.url != second.url
        for emulator in (first, second):
            with environment(emulator.env):
                store = open_store(f"{emulator.uri}/run")
                store.put_if_absent("k", emulator.uri.encode())
                assert store.list_after("") == ["k"]
                assert store.get("k") == emulator.uri.encode()
    finally:
        first.stop()
        second.stop()
    first.stop()
    assert first.process.poll() is not None
    assert second.process.poll() is not None


def test_another_process_reaches_it_by_its_environment() -> None:
    emulator = start_fake_gcs()
    try:
        code = f"from tunix_core.storage.store import open_store; open_store('{emulator.uri}/run').put('k', b'x')"
        subprocess.run(
            [sys.executable, "-c", code], cwd=_ROOT, env={**os.environ, **emulator.env}, check=True, timeout=60
        )
        with environment(emulator.env):
            assert open_store(f"{emulator.uri}/run").get("k") == b"x"
    finally:
        emulator.stop()
