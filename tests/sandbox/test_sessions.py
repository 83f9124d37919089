"""Files persist between the calls of one session, and nowhere else."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.sandbox.conftest import QUICK, Sandboxes
from tunix_core.errors import ConfigError
from tunix_core.sandbox.results import SandboxResult

SHOW = """
import os
for folder, folders, files in sorted(os.walk('.')):
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        kind = 'link ' + os.readlink(path) if os.path.islink(path) else 'folder' if os.path.isdir(path) else open(path).read()
        print(path, oct(os.lstat(path).st_mode & 0o777), kind)
"""


def run(sandboxes: Sandboxes, session: object, source: str, **options: object) -> SandboxResult:
    return sandboxes.wait(session.run(source, **options))  # type: ignore[attr-defined]


def test_a_working_directory_persists_with_folders_links_and_modes(sandboxes: Sandboxes) -> None:
    session = sandboxes.pool.session(files={"notes/a.txt": b"one"})
    run(
        sandboxes,
        session,
        "import os\n"
        "open('notes/a.txt', 'a').write(' two'); os.chmod('notes/a.txt', 0o640)\n"
        "os.mkdir('empty', 0o700); os.symlink('notes/a.txt', 'link'); os.symlink('/etc/passwd', 'away')\n"
        "open('/tmp/elsewhere', 'w').write('x')",
    )
    shown = run(sandboxes, session, SHOW)
    assert shown.stdout.splitlines() == [
        "./away 0o777 link /etc/passwd",
        "./empty 0o700 folder",
        "./link 0o777 link notes/a.txt",
        "./notes 0o755 folder",
        "./notes/a.txt 0o640 one two",
    ]
    assert dict(session.files) == {"notes/a.txt": b"one two"}
    assert run(sandboxes, session, "import os; print(os.listdir('/tmp'))").stdout == "['shm', 'work']\n"


def test_sessions_do_not_meet_whatever_sandbox_they_run_in(sandboxes: Sandboxes) -> None:
    async def episode(number: int) -> list[str]:
        session = sandboxes.pool.session()
        seen = []
        for step in range(3):
            result = await session.run(f"import os\nprint(sorted(os.listdir()))\nopen('{number}-{step}', 'w').close()")
            seen.append(result.stdout)
        return seen

    async def many() -> list[list[str]]:
        return await asyncio.gather(*(episode(number) for number in range(8)))

    for number, seen in enumerate(sandboxes.wait(many())):
        assert seen == ["[]\n", f"['{number}-0']\n", f"['{number}-0', '{number}-1']\n"]


def test_a_snapshot_is_a_value_that_other_sessions_go_on_from(sandboxes: Sandboxes) -> None:
    first = sandboxes.pool.session(files={"n": b"1"})
    kept = first.snapshot()
    run(sandboxes, first, "open('n', 'w').write('2')")
    second = sandboxes.pool.session(snapshot=kept)
    assert run(sandboxes, second, "print(open('n').read())").stdout == "1\n"
    assert dict(first.files) == {"n": b"2"}
    with pytest.raises(ConfigError, match="one of them"):
        sandboxes.pool.session(files={}, snapshot=kept)


def test_a_call_that_is_killed_leaves_the_files_that_it_had_written(sandboxes: Sandboxes) -> None:
    session = sandboxes.pool.session()
    limits = dataclasses.replace(QUICK, wall_seconds=1.0)
    source = "open('done', 'w').write('1')\nimport os\nif os.fork() == 0:\n while True: open('late', 'a').write('x')\nwhile True: pass"
    assert run(sandboxes, session, source, limits=limits).exit == "timeout"
    assert session.files["done"] == b"1"
    late = session.files.get("late", b"")
    assert run(sandboxes, session, "").ok
    assert session.files.get("late", b"") == late


@pytest.mark.parametrize(
    "source",
    [
        "for i in range(5): f = open(f'f{i}', 'wb'); f.truncate(1 << 20); f.close()",
        "import os\nfor _ in range(60): os.mkdir('d'); os.chdir('d')",
        "import os\nfor i in range(40): os.makedirs(f'{i}/x'); open(f'{i}/x/f', 'w').write('x' * 120_000)",
    ],
    ids=["sparse", "deep", "large"],
)
def test_a_tree_that_cannot_be_kept_leaves_the_one_before(sandboxes: Sandboxes, source: str) -> None:
    session = sandboxes.pool.session(files={"old": b"1"})
    assert run(sandboxes, session, source).exit == "files"
    assert dict(session.files) == {"old": b"1"}
    assert run(sandboxes, session, SHOW).stdout == "./old 0o644 1\n"


def test_odd_names_and_forbidding_modes_persist(sandboxes: Sandboxes) -> None:
    session = sandboxes.pool.session()
    run(
        sandboxes,
        session,
        "import os\nos.mkdir('d'); open('d/f', 'w').write('1'); os.chmod('d/f', 0); os.chmod('d', 0)\n"
        "open(b'\\xff\\n -rf', 'w').write('2'); open('x' * 200, 'w').close()",
    )
    assert session.files["\udcff\n -rf"] == b"2"
    assert session.files["d/f"] == b"1"
    again = run(
        sandboxes,
        session,
        "import os\nprint(oct(os.stat('d').st_mode & 0o777)); os.chmod('d', 0o700)\nprint(oct(os.stat('d/f').st_mode & 0o777))",
    )
    assert again.stdout == "0o0\n0o0\n"


def test_a_module_that_a_session_rewrites_is_imported_anew(sandboxes: Sandboxes) -> None:
    session = sandboxes.pool.session(files={"helper.py": b"value = 1"})
    assert (
        run(sandboxes, session, "import helper; print(helper.value); open('helper.py', 'w').write('value = 2')").stdout
        == "1\n"
    )
    assert run(sandboxes, session, "import helper; print(helper.value)").stdout == "2\n"
    assert set(session.files) == {"helper.py"}
