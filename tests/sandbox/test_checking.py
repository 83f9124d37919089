"""Submissions under tests, and the ways in which one may try to pass without being right."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.sandbox.conftest import QUICK, Sandboxes
from tunix_core.errors import ConfigError
from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.pool import SandboxPool
from tunix_core.sandbox.results import Verdict

ADD_TESTS = {
    "small": "assert add(2, 3) == 5",
    "negative": "assert add(-2, 3) == 1",
    "refuses": "try:\n    add('x', 1)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError('accepted')",
}


def check(sandboxes: Sandboxes, source: str, tests: dict[str, str] | None = None, **options: object) -> Verdict:
    return sandboxes.wait(sandboxes.pool.check(source, tests=tests or ADD_TESTS, **options))  # type: ignore[arg-type]


def test_a_right_submission_passes_every_test(sandboxes: Sandboxes) -> None:
    verdict = check(sandboxes, "def add(a, b):\n    print('called')\n    return a + b")
    assert verdict.passed
    assert verdict.num_passed == 3
    assert (verdict.submission.exit, verdict.checker.exit) == ("ok", "ok")
    assert verdict.submission.stdout == "called\n" * 3


def test_a_wrong_one_fails_the_tests_it_is_wrong_in(sandboxes: Sandboxes) -> None:
    verdict = check(sandboxes, "def add(a, b):\n    return abs(a) + b if isinstance(a, int) else 0")
    assert {name: outcome.passed for name, outcome in verdict.tests.items()} == {
        "small": True,
        "negative": False,
        "refuses": False,
    }
    assert verdict.tests["refuses"].message == "AssertionError: accepted"
    assert not verdict.passed


def test_classes_iterators_constants_and_plain_values_of_any_depth_reach_the_tests(sandboxes: Sandboxes) -> None:
    source = """
import collections, enum
LIMIT = 7
class Stack:
    kind = 'stack'
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
class Full(ValueError): pass
def same(value): return value
def count(n): yield from range(n)
def fail(): raise Full('full')
def named(): return collections.namedtuple('P', 'x y')(1, collections.Counter('aab'))
def apply(f, x): return f(x)
def merge(a, b): return a.items + b.items
sum = 3
"""
    tests = {
        "constant": "assert LIMIT == 7 and submission.LIMIT == 7",
        "object": "s = Stack(1); s.push(2).push((3,)); assert len(s) == 3 and s[2] == (3,) and list(s) == [1, 2, (3,)] and 2 in s and 9 not in s",
        "attributes": "assert Stack.kind == 'stack' and Stack(1).items == [1]",
        "arguments": "assert merge(Stack(1), Stack(2)) == [1, 2] and apply(same, 4) == 4",
        "callback": "try:\n    apply(lambda x: x, 1)\nexcept TypeError as error:\n    assert 'plain values' in str(error)",
        "iterator": "assert list(count(3)) == [0, 1, 2]",
        "exception": "try:\n    fail()\nexcept ValueError as error:\n    assert str(error) == 'Full: full'",
        "subclasses": "assert named() == (1, {'a': 2, 'b': 1}) and type(named()) is tuple and type(named()[1]) is dict",
        "values": "for v in VALUES: assert same(v) == v and type(same(v)) is type(v)",
        "not_a_number": "assert math.isnan(same(float('nan'))) and same(float('inf')) == float('inf')",
        "builtins_stay": "assert sum([1, 2]) == 3 and submission.sum == 3",
        "keywords": "assert same(value=3) == 3",
        "missing": "try:\n    submission.nothing\nexcept AttributeError:\n    pass\nelse:\n    assert False",
    }
    setup = (
        "import math\n"
        "VALUES = [None, True, 0, -1, 2**80, -2**64, 1.5, -0.0, 3j, '', 'é\\ud800', b'\\0\\xff', [1, [2]], (1, (2,)), {1, 2}, frozenset('a'),"
        " {'a': [1], (1, 2): {3}}]"
    )
    verdict = check(sandboxes, source, tests, setup=setup)
    assert verdict.passed, {name: test.message for name, test in verdict.tests.items() if not test.passed}


def test_what_fails_in_loading_or_setup_fails_every_test(sandboxes: Sandboxes) -> None:
    for source, setup in (("1 / 0", ""), ("def add(a, b): return a + b", "import nothing")):
        verdict = check(sandboxes, source, setup=setup)
        assert verdict.num_passed == 0
        assert {outcome.message.split(":")[0] for outcome in verdict.tests.values()} <= {
            "ZeroDivisionError",
            "ModuleNotFoundError",
        }


HACKS = {
    "exit_at_import": "import sys\nsys.exit(0)",
    "exit_hard_at_import": "import os\nos._exit(0)",
    "exit_in_call": "import os\ndef add(a, b): os._exit(0)",
    "raise_system_exit": "def add(a, b): raise SystemExit(0)",
    "equal_to_everything": "class A(int):\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\n  __hash__ = int.__hash__\ndef add(a, b): return A(99)",
    "opaque_equal_to_everything": "class A:\n  __eq__ = lambda s, o: True\ndef add(a, b): return A()",
    "string_equal_to_everything": "class A(str):\n  __eq__ = lambda s, o: True\n  __hash__ = str.__hash__\ndef add(a, b): return A('x')",
    "patch_builtins": "import builtins\nfor n in ('isinstance', 'len', 'abs', 'all', 'any', 'AssertionError', 'compile', 'exec'):\n  setattr(builtins, n, lambda *a, **k: True)\ndef add(a, b): return 0",
    "patch_unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.case._Outcome = None\ndef add(a, b): return 0",
    "define_names_of_tests": "def AssertionError(*a): return ValueError()\ndef isinstance(*a): return True\ndef str(*a): return ''\n__builtins__ = {}\n__name__ = 'x'\n_run = submission = SubmissionError = lambda *a: ''\ndef add(a, b): return 0",
    "read_frames": "import sys, gc\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n    for v in list(f.f_locals.values()) + list(f.f_globals.values()):\n      if isinstance(v, (str, bytes)) and 'add' + chr(40) + '2, 3)' in str(v): return 5\n    f = f.f_back\n  return 0",
    "read_objects": "import gc\ndef add(a, b):\n  for o in gc.get_objects():\n    try:\n      if 'add' + chr(40) + '-2, 3)' in str(o)[:100000]: return 1\n    except BaseException: pass\n  return 0",
    "read_files": "import os\ndef add(a, b):\n  for d, _, fs in os.walk('/tmp'):\n    for f in fs:\n      if 'assert' in open(os.path.join(d, f), errors='replace').read(): return 5\n  return 0",
    "write_verdicts": "import json, os, struct\nfor n in range(2, 64):\n  for t in range(3):\n    b = json.dumps({'test': t, 'passed': True, 'message': ''}).encode()\n    try: os.write(n, struct.pack('<I', len(b)) + b)\n    except OSError: pass\ndef add(a, b): return 0",
    "answer_with_verdicts": "import json, os, struct\ndef add(a, b):\n  b = json.dumps({'test': 0, 'passed': True, 'message': '', 'value': None}).encode()\n  for _ in range(5): os.write(3, struct.pack('<I', len(b)) + b)\n  return 0",
    "answer_without_end": "import os, struct\ndef add(a, b):\n  os.write(3, struct.pack('<I', 2 ** 31) + b'x' * 1000)\n  return 0",
    "answer_nonsense": "import os, struct\ndef add(a, b):\n  for x in (b'', b'x', b'[]', b'{\"value\": [[[]]]}', b'[' * 100000):\n    os.write(3, struct.pack('<I', len(x)) + x)\n  return 0",
    "exit_handlers": "import atexit, os\natexit.register(lambda: os.write(1, b'3 passed'))\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "close_channel": "import os\nos.closerange(0, 100)\ndef add(a, b): return 0",
    "kill_everything": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(1, 9)\ndef add(a, b): return 0",
    "replace_server": "import sys\nfor m in list(sys.modules.values()):\n  if 'submission' in getattr(m, '__name__', '') or 'wire' in getattr(m, '__name__', ''):\n    m.encode = lambda *a: 5\n    m._answer = lambda *a: {'passed': True, 'value': True}\ndef add(a, b): return 0",
    "endless": "def add(a, b):\n  while True: pass",
    "endless_answer": "def add(a, b):\n  import itertools\n  return itertools.count()",
    "huge_answer": "def add(a, b): return 'x' * (8 << 20)",
    "deep_answer": "def add(a, b):\n  x = []\n  for _ in range(100000): x = [x]\n  return x",
    "cyclic_answer": "def add(a, b):\n  x = []; x.append(x)\n  return x",
    "raise_what_tests_expect": "def add(a, b): raise AssertionError('all passed')",
    "raise_strange": "class E(Exception):\n  def __str__(s): raise s\n  __class__ = property(lambda s: TypeError)\ndef add(a, b): raise E",
    "fork_and_race": "import os\nif os.fork() == 0:\n  pass\ndef add(a, b): return 0",
}  # fmt: skip


@pytest.mark.parametrize("name", HACKS)
def test_a_submission_that_is_not_right_does_not_pass(sandboxes: Sandboxes, name: str) -> None:
    """`refuses` is left out: raising TypeError is the right answer there."""
    tests = {name: ADD_TESTS[name] for name in ("small", "negative")}
    limits = dataclasses.replace(QUICK, wall_seconds=1.5) if name == "endless" else QUICK
    verdict = check(sandboxes, HACKS[name], tests, limits=limits)
    assert verdict.num_passed == 0, verdict
    assert list(verdict.tests) == ["small", "negative"]
    assert check(sandboxes, "def add(a, b): return a + b").passed, "the next check is as ever"


def test_a_tests_broad_except_does_not_take_a_dead_submission_for_an_error(sandboxes: Sandboxes) -> None:
    tests = {"raises": "try:\n    f()\nexcept Exception:\n    pass\nelse:\n    assert False"}
    assert check(sandboxes, "def f(): raise KeyError", tests).passed
    assert not check(sandboxes, "import os\ndef f(): os._exit(0)", tests).passed
    assert not check(sandboxes, "import os\ndef f(): os.write(3, b'\\1\\0\\0\\0x')", tests).passed


def test_tests_that_do_not_end_have_not_passed(sandboxes: Sandboxes) -> None:
    tests = {"first": "assert f() == 1", "second": "while True: pass", "third": "assert f() == 1"}
    verdict = check(sandboxes, "def f(): return 1", tests, limits=dataclasses.replace(QUICK, wall_seconds=1.5))
    assert [outcome.passed for outcome in verdict.tests.values()] == [True, False, False]
    assert verdict.tests["third"].message == "the tests ended before this one"
    assert verdict.checker.exit == "timeout"


def test_a_submission_without_tests_has_not_passed(sandboxes: Sandboxes) -> None:
    assert not sandboxes.wait(sandboxes.pool.check("x = 1", tests={})).passed


def test_tests_need_a_sandbox_of_their_own(sandboxes: Sandboxes) -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        sandboxes.wait(SandboxPool(SandboxConfig(num_slots=1)).check("", tests={"a": ""}))


def test_many_checks_share_a_pair_of_sandboxes(sandboxes: Sandboxes) -> None:
    async def many() -> list[Verdict]:
        source = "def add(a, b): return a + b"
        checks = (sandboxes.pool.check(source, tests=ADD_TESTS) for _ in range(5))
        runs = (sandboxes.pool.run("print(1)") for _ in range(5))
        *verdicts, _ = await asyncio.gather(*checks, asyncio.gather(*runs))
        return verdicts

    assert all(verdict.passed for verdict in sandboxes.wait(many()))
