"""Small programs in Monty."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import QUICK
from tunix_core.errors import ConfigError
from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.monty import MontySandbox
from tunix_core.sandbox.opening import open_sandbox
from tunix_core.sandbox.results import Sandbox, SandboxResult

LIMITS = dataclasses.replace(QUICK, memory_bytes=64 << 20, output_bytes=1000)


class Opened:
    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox) -> None:
        self.runner, self.sandbox = runner, sandbox

    def run(self, source: str, **options: object) -> SandboxResult:
        return self.runner.run(self.sandbox.run(source, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def monty() -> Iterator[Opened]:
    with asyncio.Runner() as runner:
        sandbox = runner.run(open_sandbox("monty", SandboxConfig(num_slots=2, limits=LIMITS)))
        yield Opened(runner, sandbox)
        runner.run(sandbox.close())


def test_what_a_program_prints_comes_back(monty: Opened) -> None:
    result = monty.run("x = [i ** 2 for i in range(4)]\nprint(sum(x))\nx")
    assert (result.exit, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "14\n", "")
    assert isinstance(monty.sandbox, MontySandbox)
    assert monty.sandbox.description == "monty interpreter, 2 workers; heap of 64 MiB per call"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("\ud800", "SyntaxError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import socket", "ModuleNotFoundError"),
        ("import os\nos.system('id')", "AttributeError"),
        ("().__class__.__base__.__subclasses__()", "AttributeError"),
        ("def f(x): return f(x)\nf(1)", "RecursionError"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
    ],
)
def test_an_error_is_an_error(monty: Opened, source: str, said: str) -> None:
    result = monty.run(source)
    assert (result.exit, result.exit_code) == ("error", 1)
    assert said in result.stderr


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "timeout"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "timeout"),
        ("import time\ntime.sleep(100)", "timeout"),
        ("x = []\nwhile True: x.append('a' * 100000)", "memory"),
        ("2 ** 10 ** 10", "memory"),
        ("while True: print('x' * 100)", "output"),
    ],
)
def test_a_limit_ends_it(monty: Opened, source: str, ended: str) -> None:
    wall_seconds = 20.0 if ended == "memory" else 0.4
    result = monty.run(source, limits=dataclasses.replace(LIMITS, wall_seconds=wall_seconds))
    assert (result.exit, result.exit_code) == (ended, None)
    assert len(result.stdout) == (1000 if ended == "output" else 0)
    assert result.stdout_truncated == (ended == "output")
    assert monty.run("print(1)").stdout == "1\n"


def test_nothing_of_one_call_is_in_another(monty: Opened) -> None:
    assert monty.run("leak = 1").ok
    assert all("NameError" in monty.run("print(leak)").stderr for _ in range(4))


def test_what_it_has_no_way_to_do_is_refused(monty: Opened) -> None:
    with pytest.raises(ConfigError, match="Monty reads no input"):
        monty.run("x = 1", stdin="text")


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"tunix-airflow\[monty\]"):
        asyncio.run(open_sandbox("monty"))


def test_without_its_program_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONTY_BIN", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone.*tunix-airflow\[monty\]"):
        asyncio.run(open_sandbox("monty"))
