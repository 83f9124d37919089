"""Becomes bubblewrap: joins its cgroup, and as root first stages what bubblewrap mounts, then gives root up.

A script of its own between pool and bubblewrap, so that the pool's process, which is large and has
threads, is never forked with Python code to run in between.

    python -I -S launcher.py SETTINGS   with settings as JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 0x40000, 2, 4
STAGE = "/tmp"
"""Covered by a tmpfs of this process alone."""


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_char_p(text.encode()) for text in (source, target, kind)]
    if libc.mount(*arguments, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode())) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def _stage(sources: dict[str, str]) -> None:
    """Bind each source below STAGE, where a user without rights to the source's folders reaches it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    opened = {name: os.open(source, os.O_PATH) for name, source in sources.items()}
    _mount("tmpfs", STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
    for name, descriptor in opened.items():
        target = f"{STAGE}/{name}"
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
        _mount(f"/proc/self/fd/{descriptor}", target, "", _MS_BIND, "")
        os.close(descriptor)


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.umask(0o022)
    if settings["cgroup"]:
        with open(settings["cgroup"], "w") as file:
            file.write(str(os.getpid()))
    if settings["uid"] is not None:
        _stage(settings["stage"])
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.chdir("/")
    os.execve(settings["command"][0], settings["command"], {"PATH": "/usr/bin:/bin"})


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"launcher: {error}", file=sys.stderr)
        sys.exit(71)
