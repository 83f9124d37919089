"""Where cgroups are looked for, and what is written, for both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunix_core.sandbox import cgroups

V1 = "30 25 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
V2 = "35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ("4:memory:/a/b\n1:cpu,cpuacct:/c\n0::/", V1, [(1, "/sys/fs/cgroup/memory/a/b")]),
        ("0::/unit/sub", V2, [(2, "/sys/fs/cgroup/unit"), (2, "/sys/fs/cgroup/unit/sub")]),
        ("0::/", V2, [(2, "/sys/fs/cgroup")]),
        ("1:cpu:/", V1, []),
        ("4:memory:/docker/x/y\n0::/", V1.replace(" / /sys/fs/cgroup/memory", " /docker/x /sys/fs/cgroup/memory"), [(1, "/sys/fs/cgroup/memory/y")]),
        ("4:memory:/elsewhere", V1.replace(" / /sys/fs/cgroup/memory", " /docker/x /sys/fs/cgroup/memory"), [(1, "/sys/fs/cgroup/memory")]),
    ],
    ids=["version 1", "version 2", "version 2 root", "no memory controller", "container", "container, other root"],
)  # fmt: skip
def test_folders_that_are_tried(own: str, mounts: str, expected: list[tuple[int, str]]) -> None:
    assert cgroups._candidates(own, mounts) == [(version, Path(folder)) for version, folder in expected]


def test_version_2_is_written_by_its_names(tmp_path: Path) -> None:
    group = cgroups.MemoryCgroup(tmp_path / "slot", 2)
    for name, content in (
        ("memory.max", "max"),
        ("memory.swap.max", "max"),
        ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
    ):
        (tmp_path / "slot" / name).write_text(content)
    group.limit(123 << 20)
    assert (tmp_path / "slot" / "memory.max").read_text() == str(123 << 20)
    assert (tmp_path / "slot" / "memory.swap.max").read_text() == "0"
    assert group.num_kills() == 2
    assert not group.try_remove(), "a folder that is not empty, as a cgroup with a process in it"


def test_version_1_is_written_by_its_names(tmp_path: Path) -> None:
    group = cgroups.MemoryCgroup(tmp_path / "slot", 1)
    (tmp_path / "slot" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    group.limit(99)
    assert (tmp_path / "slot" / "memory.limit_in_bytes").read_text() == "99"
    assert (tmp_path / "slot" / "memory.memsw.limit_in_bytes").read_text() == "99"
    assert group.num_kills() == 7


def test_version_2_without_a_delegated_controller_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    mounts = V2.replace("/sys/fs/cgroup", str(tmp_path))
    with pytest.raises(cgroups.CgroupsUnavailable, match=r"version 2 at .*subtree_control has no memory controller"):
        cgroups.open_parent("0::/", mounts)
    assert os.listdir(tmp_path) == ["cgroup.subtree_control"]
    with pytest.raises(cgroups.CgroupsUnavailable, match="no cgroup hierarchy"):
        cgroups.open_parent("0::/", "")
