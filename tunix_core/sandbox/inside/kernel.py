"""System calls that the standard library has no function for."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_LIBC.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_LIBC.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 22, 38, 47
_CLEAR_ALL, _MODE_FILTER = 4, 2
_CAPABILITY_VERSION = 0x20080522
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int = 0, more: int = 0) -> None:
    _checked(_LIBC.prctl(option, value, more, 0, 0), f"prctl {option}")


def mount_tmpfs(target: str, num_bytes: int, num_files: int) -> None:
    options = f"size={num_bytes},nr_inodes={num_files},mode=0700"
    _checked(
        _LIBC.mount(b"tmpfs", target.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()), f"mount {target}"
    )


def unmount(target: str) -> None:
    _checked(_LIBC.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def drop_capabilities() -> None:
    prctl(PR_CAP_AMBIENT, _CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITY_VERSION, 0))
    _checked(_LIBC.capset(header, ctypes.create_string_buffer(24)), "capset")


class Filter:
    """A seccomp program, laid out once."""

    def __init__(self, program: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(program, len(program))
        self._program = _Program(len(program) // 8, ctypes.addressof(self._instructions))

    def install(self) -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(self._program))


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit, and never above what holds already."""
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))
