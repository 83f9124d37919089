"""Calls, their results and limits, and what becomes of a sandbox that breaks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sandbox.conftest import QUICK, Sandboxes
from tunix_core.errors import ConfigError, EnvironmentFailure
from tunix_core.processes import wait_until
from tunix_core.sandbox import cgroups
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.pool import SandboxLost, SandboxPool
from tunix_core.sandbox.slot import Slot

ROOT = Path(__file__).parents[2]


def zygote_of(slot: Slot) -> int:
    """Its pid on this host: bubblewrap's only child."""
    assert slot._process is not None
    return int(Path(f"/proc/{slot._process.pid}/task/{slot._process.pid}/children").read_text())


def test_a_program_has_its_input_and_files_and_hands_back_what_is_asked_for(sandboxes: Sandboxes) -> None:
    result = sandboxes.run(
        "import sys\n"
        "print(sys.stdin.read() + open('data/a.txt').read(), __name__, sys.argv)\n"
        "print('warning', file=sys.stderr)\n"
        "import os; os.makedirs('out/deep'); open('out/deep/b', 'wb').write(bytes([0, 255]))",
        stdin="héllo ",
        files={"data/a.txt": "wörld".encode(), "plain": b""},
        collect=["out/deep/b", "plain", "missing", "out"],
    )
    assert result.ok
    assert (result.exit_code, result.stdout, result.stderr) == (0, "héllo wörld __main__ ['main.py']\n", "warning\n")
    assert dict(result.files) == {"out/deep/b": b"\0\xff", "plain": b""}
    assert 0 < result.seconds < QUICK.wall_seconds


def test_a_traceback_shows_the_programs_own_lines(sandboxes: Sandboxes) -> None:
    result = sandboxes.run("def f():\n    return {}['x']\nf()")
    assert (result.exit, result.exit_code) == ("error", 1)
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    f()'
    )
    assert result.stderr.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("\ud800", "UnicodeEncodeError"),
        ("x = 1\0", "null bytes"),
        ("(" * 300, "SyntaxError"),
    ],
)
def test_text_that_is_no_program_is_an_error(sandboxes: Sandboxes, source: str, said: str) -> None:
    result = sandboxes.run(source)
    assert result.exit == "error"
    assert said in result.stderr


def test_programs_may_use_threads_processes_and_event_loops(sandboxes: Sandboxes) -> None:
    result = sandboxes.run(
        "import asyncio, atexit, multiprocessing, threading\n"
        "threading.Thread(target=print, args=('thread',)).start()\n"
        "async def main(): await asyncio.sleep(0); print('loop')\n"
        "asyncio.run(main())\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2]))\n"
        "atexit.register(print, 'end')"
    )
    assert result.stdout.split("\n") == ["thread", "loop", "[1, 2]", "end", ""]


def test_the_same_program_prints_the_same_in_every_sandbox(sandboxes: Sandboxes) -> None:
    async def both() -> set[str]:
        return {(await sandboxes.pool.run("print({str(i) for i in range(50)})")).stdout for _ in range(2)}

    assert len(sandboxes.wait(both())) == 1
    assert sandboxes.run("import random; print(random.random())") != sandboxes.run(
        "import random; print(random.random())"
    )


def test_output_is_cut_at_its_limit_and_said_to_be(sandboxes: Sandboxes) -> None:
    limits = SandboxLimits(wall_seconds=20.0, output_bytes=1000)
    exact = sandboxes.run("print('x' * 999)", limits=limits)
    assert (exact.exit, len(exact.stdout), exact.stdout_truncated) == ("ok", 1000, False)
    more = sandboxes.run("import os, time\nos.write(2, b'y' * 1001)\ntime.sleep(60)", limits=limits)
    assert (more.exit, more.stderr, more.stderr_truncated, more.stdout_truncated) == ("output", "y" * 1000, True, False)


def test_what_was_printed_before_the_time_was_up_is_there(sandboxes: Sandboxes) -> None:
    result = sandboxes.run("print('early', flush=True)\nwhile True: pass", limits=SandboxLimits(wall_seconds=0.5))
    assert (result.exit, result.stdout) == ("timeout", "early\n")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "x\0y"])
def test_names_that_leave_the_working_directory_are_refused(sandboxes: Sandboxes, name: str) -> None:
    with pytest.raises(ConfigError, match="relative paths without dots"):
        sandboxes.run("", files={name: b""})
    with pytest.raises(ConfigError, match="relative paths without dots"):
        sandboxes.run("", collect=[name])


def test_files_beyond_the_limits_are_refused(sandboxes: Sandboxes) -> None:
    with pytest.raises(ConfigError, match="file_bytes"):
        sandboxes.run("", files={"a": bytes(QUICK.file_bytes + 1)})
    with pytest.raises(ConfigError, match="tmp_bytes"):
        sandboxes.run("", files={name: bytes(QUICK.file_bytes) for name in "abc"})
    with pytest.raises(ConfigError, match="tmp_files"):
        sandboxes.run("", files={str(number): b"" for number in range(QUICK.tmp_files)})
    with pytest.raises(ConfigError, match="a file or a folder of that name"):
        sandboxes.run("", files={"a/b": b"", "a": b""})


@pytest.mark.parametrize(
    ("source", "returned"),
    [
        ("import os; os.symlink('/python/lib', 'l')", {}),
        ("import os; os.mkdir('d'); open('d/l', 'w').write('1'); os.symlink('d', 'e')", {}),
        ("import os; os.mkdir('l')", {}),
        ("import os; open('l', 'w').write('1'); os.chmod('l', 0)", {"l": b"1"}),
    ],
)
def test_only_regular_files_are_handed_back(sandboxes: Sandboxes, source: str, returned: dict[str, bytes]) -> None:
    result = sandboxes.run(source, collect=["l", "l/os.py", "e/l"])
    assert result.ok, result
    assert dict(result.files) == returned


def test_more_than_may_be_handed_back_is_an_exit_of_its_own(sandboxes: Sandboxes) -> None:
    sparse = "f = open('f', 'wb'); f.truncate(8 << 20)"
    assert sandboxes.run(sparse, collect=["f"]).exit == "files"
    assert sandboxes.run(sparse, collect=["f"], limits=SandboxLimits(wall_seconds=20.0, returned_bytes=8 << 20)).ok


def test_a_few_sandboxes_serve_many_callers(sandboxes: Sandboxes) -> None:
    async def many() -> list[str]:
        results = await asyncio.gather(*(sandboxes.pool.run(f"print({i} ** 2)") for i in range(40)))
        return [result.stdout for result in results]

    assert sandboxes.wait(many()) == [f"{i**2}\n" for i in range(40)]


def test_a_cancelled_call_is_killed_and_its_sandbox_goes_on(sandboxes: Sandboxes) -> None:
    async def scenario() -> None:
        pool = sandboxes.pool
        calls = [asyncio.ensure_future(pool.run("import time; time.sleep(60)")) for _ in range(4)]
        await asyncio.sleep(0.3)
        started = time.monotonic()
        for call in calls:
            call.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True)
        )
        assert (await asyncio.gather(*(pool.run("print(1)") for _ in range(2))))[1].stdout == "1\n"
        assert time.monotonic() - started < 15

    before, replaced = set(sandboxes.pool._slots), sandboxes.pool.counters.num_replaced
    sandboxes.wait(scenario())
    assert set(sandboxes.pool._slots) == before
    assert sandboxes.pool.counters.num_replaced == replaced
    assert sandboxes.pool.counters.calls["cancelled"] == 2


@pytest.mark.parametrize("num_yields", [0, 1, 2, 5])
def test_a_close_that_is_cancelled_ends_every_sandbox_all_the_same(num_yields: int) -> None:
    async def scenario() -> None:
        pool = SandboxPool(SandboxConfig(num_slots=2, limits=QUICK))
        await pool.start()
        processes = [slot._process for slot in pool._slots]
        closing = asyncio.ensure_future(pool.close())
        for _ in range(1 + num_yields):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert pool._slots == set()
        assert all(process is not None and process.poll() is not None for process in processes)
        await pool.close()
        with pytest.raises(ConfigError, match="not open"):
            await pool.run("print(1)")

    asyncio.run(scenario())


def test_a_sandbox_that_dies_is_replaced_and_others_do_not_notice(sandboxes: Sandboxes) -> None:
    async def scenario() -> None:
        pool = sandboxes.pool
        first = asyncio.ensure_future(pool.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.1)
        (victim,) = pool._slots - set(pool._idle)
        second = asyncio.ensure_future(pool.run("import time; time.sleep(1); print('unaffected')"))
        await asyncio.sleep(0.1)
        os.kill(zygote_of(victim), signal.SIGKILL)
        assert (await first).exit == "lost"
        assert (await second).stdout == "unaffected\n"
        assert [r.stdout for r in await asyncio.gather(*(pool.run("print(1)") for _ in range(3)))] == ["1\n"] * 3
        assert victim not in pool._slots

    sandboxes.settle()
    replaced = sandboxes.pool.counters.num_replaced
    sandboxes.wait(scenario())
    sandboxes.settle()
    assert sandboxes.pool.counters.num_replaced == replaced + 1


def test_a_sandbox_that_says_what_it_never_says_is_replaced(sandboxes: Sandboxes) -> None:
    async def scenario() -> str:
        slot = sandboxes.pool._idle[-1]
        call = asyncio.ensure_future(sandboxes.pool.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.1)
        assert slot._done is not None
        slot._done.set_result(b"nonsense")
        return (await call).exit

    sandboxes.settle()
    replaced = sandboxes.pool.counters.num_replaced
    assert sandboxes.wait(scenario()) == "lost"
    sandboxes.settle()
    assert [sandboxes.run("print(1)").stdout for _ in range(3)] == ["1\n"] * 3
    assert sandboxes.pool.counters.num_replaced == replaced + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into a process that is not dumpable")
def test_the_zygote_can_be_read_by_root_alone_and_holds_nothing_of_a_call(sandboxes: Sandboxes) -> None:
    marks = ("tunix-src-" + "q" * 20, "tunix-in-" + "q" * 20, "tunix-out-" + "q" * 20, "tunix-file-" + "q" * 20)
    source = f"x = {marks[0]!r}\nprint({marks[2][:-1]!r} + 'q')\nopen('g', 'w').write({marks[3][:-1]!r} + 'q')"
    for _ in range(3):
        result = sandboxes.run(source, stdin=marks[1], files={"f": marks[3].encode()}, collect=["f", "g"])
        assert result.files["g"] == marks[3].encode()
        assert result.stdout.strip() == marks[2]
    sandboxes.settle()
    for slot in sandboxes.pool._slots:
        pid = zygote_of(slot)
        assert os.stat(f"/proc/{pid}/mem").st_uid == 0, "dumpable: its user could read and write it"
        memory = _memory(pid)
        assert b"tunix_core.sandbox.inside" in memory
        assert not [mark for mark in marks if mark.encode() in memory]


def test_a_calls_process_has_no_capability_and_a_filter(sandboxes: Sandboxes) -> None:
    async def scenario() -> dict[str, str]:
        call = asyncio.ensure_future(sandboxes.pool.run("print(1, flush=True)\nimport time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        (slot,) = sandboxes.pool._slots - set(sandboxes.pool._idle)
        (pid,) = descendants(zygote_of(slot))
        status = Path(f"/proc/{pid}/status").read_text()
        call.cancel()
        return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)

    sandboxes.settle()
    status = sandboxes.wait(scenario())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert "0" not in status["Uid"].split()
    sandboxes.settle()


def _memory(pid: int) -> bytes:
    parts = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights = line.split()[:2]
            first, last = (int(part, 16) for part in span.split("-"))
            if rights.startswith("rw"):
                file.seek(first)
                parts.append(file.read(last - first))
    return b"".join(parts)


def test_the_memory_of_a_call_is_bounded_as_a_whole(sandboxes: Sandboxes) -> None:
    """Four processes of half the limit each, under a cgroup; without one, the description says what holds."""
    if "memory cgroup version" not in sandboxes.pool.description:
        assert "of address space for each of 16 processes" in sandboxes.pool.description
        return
    result = sandboxes.run(
        "import os, time\npids = []\nfor _ in range(4):\n"
        " pids.append(os.fork())\n"
        " if pids[-1] == 0:\n  x = bytearray(90 << 20)\n  time.sleep(1)\n  os._exit(0)\n"
        "raise SystemExit(sum(os.waitpid(p, 0)[1] != 0 for p in pids))"
    )
    assert result.exit == "memory"
    assert result.exit_code is not None
    assert result.exit_code > 0


def test_nothing_is_called_before_start_or_after_close() -> None:
    async def scenario() -> None:
        pool = SandboxPool(SandboxConfig(num_slots=1, limits=QUICK))
        with pytest.raises(ConfigError, match="Call start"):
            await pool.run("")
        async with pool:
            with pytest.raises(ConfigError, match="one start"):
                await pool.start()
            waiting = [asyncio.ensure_future(pool.run("import time; time.sleep(60)")) for _ in range(2)]
            await asyncio.sleep(0.2)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(end, "exit", type(end)) for end in ends] == ["lost", ConfigError]
        with pytest.raises(ConfigError, match="before close"):
            await pool.run("")
        await pool.close()

    asyncio.run(scenario())


def test_a_pool_without_any_sandbox_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with SandboxPool(SandboxConfig(num_slots=1, limits=QUICK)) as pool:
            assert pool._bubblewrap is not None
            pool._bubblewrap = pool._bubblewrap._replace(path="/gone", staged_path="/gone")
            os.kill(zygote_of(next(iter(pool._slots))), signal.SIGKILL)
            await asyncio.sleep(0.2)
            with pytest.raises(SandboxLost, match="no sandbox could be started"):
                await pool.run("print(1)")
            assert pool.counters.num_missing == 1

    monkeypatch.setattr("tunix_core.sandbox.pool._START_PAUSES", (0.0, 0.01))
    assert issubclass(SandboxLost, EnvironmentFailure)
    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.pool import SandboxPool
async def main():
    async with SandboxPool(SandboxConfig(num_slots=2)) as pool:
        calls = [asyncio.ensure_future(pool.run("import time; time.sleep(600)")) for _ in range(2)]
        await asyncio.sleep(0.5)
        print(*(slot._process.pid for slot in pool._slots), flush=True)
        if sys.argv[1] == "end":
            return
        await asyncio.gather(*calls)
asyncio.run(main())
"""


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.parametrize("end", ["kill", "terminate", "end"])
def test_no_process_outlives_the_pools(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, end], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        outer = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(outer) == 2
        below = [pid for first in outer for pid in _below(first)]
        if end == "kill":
            assert len(below) == 4, "a zygote and a call in each"
            parent.kill()
        elif end == "terminate":
            parent.terminate()
        parent.wait(30)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [*outer, *below]), 120.0)
    assert list(tmp_path.iterdir()) == []


def _below(pid: int) -> list[int]:
    try:
        return descendants(pid)
    except FileNotFoundError:  # it has ended already
        return []


def test_cgroups_that_a_killed_process_left_are_removed() -> None:
    try:
        parent = cgroups.open_parent()
    except cgroups.CgroupsUnavailable:
        pytest.skip("no memory cgroup is writable here")
    left = parent._folder.with_name("tunix-sandbox-999999999-1-1")
    left.mkdir()
    (left / "slot-1").mkdir()
    other = cgroups.open_parent()
    assert not left.exists()
    assert parent._folder.exists(), "of a process that lives"
    other.remove()
    parent.remove()
    assert not parent._folder.exists()
