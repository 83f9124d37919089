"""What only the folder backend has: files, crashes, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunix_core.errors import ConfigError, ObjectExists, StoreError
from tunix_core.storage.local_store import LocalStore

_ROOT = Path(__file__).parents[2]

_KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from tunix_core.storage.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
step = sys.argv[2]
store.put("warm", b"")
def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, step, die)
getattr(store, sys.argv[3])("a/k", b"new" * 1000, *sys.argv[4:])
"""

_CLAIM = """
import sys
from pathlib import Path
from tunix_core.errors import ObjectExists
from tunix_core.storage.local_store import LocalStore
from tunix_core.storage.store import update_json
store = LocalStore(Path(sys.argv[1]))
sys.stdin.readline()
for i in range(30):
    try:
        store.put_if_absent(f"claims/{i}", sys.argv[2].encode())
    except ObjectExists:
        pass
for i in range(20):
    update_json(store, "count", lambda c: {"n": (c or {"n": 0})["n"] + 1}, retries=500)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=_ROOT, capture_output=True, timeout=240)


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_writer_killed_before_the_link_leaves_nothing_to_see(tmp_path: Path, step: str) -> None:
    store = LocalStore(tmp_path)
    assert run(_KILLED_WHILE_WRITING, str(tmp_path), step, "put_if_absent").returncode == -9
    assert list((tmp_path / ".tmp").iterdir()), "the test must leave a temporary file behind"
    assert store.list_after("") == ["warm"]
    assert not store.exists("a/k")
    store.put_if_absent("a/k", b"later")
    assert store.list_after("") == ["a/k", "warm"]


def test_a_writer_killed_before_the_rename_changes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version = store.put_if_absent("a/k", b"old")
    for verb, *rest in (("put_if_version", version), ("put",)):
        assert run(_KILLED_WHILE_WRITING, str(tmp_path), "replace", verb, *rest).returncode == -9
        assert store.get_with_version("a/k") == (b"old", version)
    store.put_if_version("a/k", b"next", version)  # the dead one's lock is gone with it


def test_old_leftovers_are_removed_and_young_ones_kept(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    old, young = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    LocalStore(tmp_path).put("k", b"")
    assert not old.exists()
    assert young.exists()


def test_races_between_processes(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _CLAIM, str(tmp_path), name], cwd=_ROOT, stdin=subprocess.PIPE)
        for name in ("one", "two", "three")
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(timeout=240) for process in processes] == [0, 0, 0]
    store = LocalStore(tmp_path)
    assert {store.get(f"claims/{i}") for i in range(30)} <= {b"one", b"two", b"three"}
    assert b'"n": 60' in store.get("count")


def test_versions_rise_even_when_the_clock_falls(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("k", b"1")
    ahead = time.time_ns() + 10**15
    os.utime(tmp_path / "k", ns=(ahead, ahead))  # written while the clock was ahead
    version = store.get_with_version("k")[1]
    assert store.put_if_version("k", b"1", version) != version
    assert os.stat(tmp_path / "k").st_mtime_ns > ahead


def test_a_listing_enters_no_folder_that_sorts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for hour in range(24):
        store.put(f"trajectories/hour={hour:02d}/x", b"")
    seen: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(str(path)) or scandir(path))
    assert store.list_after("trajectories/", "trajectories/hour=22/x") == ["trajectories/hour=23/x"]
    assert sorted(Path(path).name for path in seen) == ["hour=22", "hour=23", "trajectories"]


def test_opening_and_reading_create_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "absent")
    assert store.list_after("") == []
    assert not store.exists("k")
    store.delete("k")
    assert not (tmp_path / "absent").exists()


def test_a_key_cannot_be_object_and_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    with pytest.raises(ConfigError, match="folder of another"):
        store.put("a/b", b"")
    store.put("c/d", b"")
    with pytest.raises((ConfigError, ObjectExists)):
        store.put_if_absent("c", b"")


def test_a_failing_disk_is_a_store_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("warm", b"")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store.put_if_absent("a", b"x" * 100)
    monkeypatch.undo()
    assert store.list_after("") == ["warm"]
    assert list((tmp_path / ".tmp").iterdir()) == []
