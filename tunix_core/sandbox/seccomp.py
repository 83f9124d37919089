"""The system calls that untrusted code may make: an allow-list as a BPF program, built from tables in this file.

Three answers. What Python programs need is allowed (some of it with certain arguments only). What no
program of ours needs and attacks use ends the process, so that the call's result says so. Everything
else gets EPERM, and ENOSYS where the number is newer than these tables, as an old kernel would say.
System calls of another architecture (32-bit ones on x86-64, x32) end the process.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

from tunix_core.errors import ConfigError

_LD_W_ABS, _JA, _JEQ_K, _JGE_K, _JSET_K, _RET_K = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG_LOW = 0, 4, (16, 24, 32, 40, 48, 56)
ALLOW, KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
REFUSED = _ERRNO | errno.EPERM
UNKNOWN = _ERRNO | errno.ENOSYS
NOT_A_TERMINAL = _ERRNO | errno.ENOTTY

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_LAST_KNOWN = 462
_X32_BIT = 0x40000000


class Architecture(NamedTuple):
    audit: int
    """AUDIT_ARCH_*, as the kernel reports it."""
    column: int
    """Of the tables below."""


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}

# name -> number on x86_64, on aarch64; None where it does not exist.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files, all of them inside the sandbox's own root
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "dup": (32, 23),
    "dup2": (33, None),
    "sendfile": (40, 71),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "getdents": (78, None),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "rename": (82, None),
    "mkdir": (83, None),
    "rmdir": (84, None),
    "creat": (85, None),
    "link": (86, None),
    "unlink": (87, None),
    "symlink": (88, None),
    "readlink": (89, None),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "umask": (95, 166),
    "utime": (132, None),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "getdents64": (217, 61),
    "fadvise64": (221, 223),
    "utimes": (235, None),
    "openat": (257, 56),
    "mkdirat": (258, 34),
    "futimesat": (261, None),
    "newfstatat": (262, 79),
    "unlinkat": (263, 35),
    "renameat": (264, 38),
    "linkat": (265, 37),
    "symlinkat": (266, 36),
    "readlinkat": (267, 78),
    "fchmodat": (268, 53),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "utimensat": (280, 88),
    "fallocate": (285, 47),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "renameat2": (316, 276),
    "copy_file_range": (326, 285),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "statx": (332, 291),
    "close_range": (436, 436),
    "faccessat2": (439, 439),
    # memory
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    # processes, threads, signals: of the sandbox's own pid namespace
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "pause": (34, None),
    "getpid": (39, 172),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "exit": (60, 93),
    "wait4": (61, 260),
    "kill": (62, 129),
    "uname": (63, 160),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "setpgid": (109, 154),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "setsid": (112, 157),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "getpriority": (140, 141),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "prctl": (157, 167),
    "arch_prctl": (158, None),
    "setrlimit": (160, 164),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_setaffinity": (203, 122),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "exit_group": (231, 94),
    "tgkill": (234, 131),
    "waitid": (247, 95),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "prlimit64": (302, 261),
    "getcpu": (309, 168),
    "rseq": (334, 293),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    # time
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "timer_create": (222, 107),
    "timer_settime": (223, 110),
    "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "sysinfo": (99, 179),
    # event loops: asyncio's self-pipe is a socket pair, which reaches nobody
    "ioctl": (16, 29),
    "epoll_create": (213, None),
    "epoll_wait": (232, None),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "signalfd4": (289, 74),
    "epoll_pwait2": (441, 441),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "getrandom": (318, 278),
}

FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}

# glibc falls back to clone, whose flags a filter can read, where this does not exist.
_ABSENT = {"clone3": (435, 435)}

_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_HARMLESS_PRCTLS = (1, 2, 3, 15, 16, 39)
"""PDEATHSIG set and get, DUMPABLE get, NAME set and get, NO_NEW_PRIVS get."""
_AF_UNIX = 1


def architecture(machine: str | None = None) -> Architecture:
    """Of this machine.

    Raises:
        ConfigError: there is no table for it.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigError(
            "sandbox architecture", machine, ", ".join(ARCHITECTURES), "Run sandboxes on such a machine, or use monty."
        )
    return ARCHITECTURES[machine]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _only(argument: int, accepted: Sequence[int], otherwise: int) -> list[bytes]:
    """Allow where the low half of an argument is one of `accepted`."""
    steps = [_instruction(_LD_W_ABS, _ARG_LOW[argument])]
    for position, value in enumerate(accepted):
        steps.append(_instruction(_JEQ_K, value, len(accepted) - position, 0))
    return [*steps, _instruction(_RET_K, otherwise), _instruction(_RET_K, ALLOW)]


def _conditions(name: str) -> list[bytes] | None:
    if name == "clone":
        return [
            _instruction(_LD_W_ABS, _ARG_LOW[0]),
            _instruction(_JSET_K, NAMESPACE_FLAGS, 0, 1),
            _instruction(_RET_K, REFUSED),
            _instruction(_RET_K, ALLOW),
        ]
    if name == "socketpair":
        return _only(0, (_AF_UNIX,), REFUSED)
    if name == "ioctl":
        return _only(1, _HARMLESS_IOCTLS, NOT_A_TERMINAL)
    if name == "prctl":
        return _only(0, _HARMLESS_PRCTLS, REFUSED)
    if name == "prlimit64":
        return _only(0, (0,), REFUSED)
    return None


def _leaves(arch: Architecture) -> list[tuple[int, bytes]]:
    """(first number, instructions for it and those after it up to the next leaf), in ascending order."""
    answers = dict.fromkeys(range(_LAST_KNOWN + 1), _instruction(_RET_K, REFUSED))
    for table, verdict in ((ALLOWED, ALLOW), (FORBIDDEN, KILL_PROCESS), (_ABSENT, UNKNOWN)):
        for name, numbers in table.items():
            number = numbers[arch.column]
            if number is not None:
                conditions = _conditions(name) if table is ALLOWED else None
                answers[number] = b"".join(conditions or [_instruction(_RET_K, verdict)])
    answers[_LAST_KNOWN + 1] = _instruction(_RET_K, UNKNOWN)
    answers[_X32_BIT] = _instruction(_RET_K, KILL_PROCESS)
    leaves: list[tuple[int, bytes]] = []
    for number, steps in sorted(answers.items()):
        if not leaves or leaves[-1][1] != steps:
            leaves.append((number, steps))
    return leaves


def _search(leaves: Sequence[tuple[int, bytes]]) -> bytes:
    """Binary search by number: the kernel tries every number when a filter is installed, which is at every call."""
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    below, above = _search(leaves[:middle]), _search(leaves[middle:])
    jump = _instruction(_JGE_K, leaves[middle][0], 0, 1) + _instruction(_JA, len(below) // 8)
    return jump + below + above


def program(arch: Architecture) -> bytes:
    """The filter: an array of `struct sock_filter`."""
    head = [
        _instruction(_LD_W_ABS, _ARCH),
        _instruction(_JEQ_K, arch.audit, 1, 0),
        _instruction(_RET_K, KILL_PROCESS),
        _instruction(_LD_W_ABS, _NR),
    ]
    return b"".join(head) + _search(_leaves(arch))
