"""Attempts to get out of a sandbox, or to leave something in it; each really tries.

After every attempt a call in every sandbox of the pool answers as if nothing had happened, and the
sandboxes are the same processes as before unless the case says that one is lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sandbox.conftest import QUICK, Sandboxes
from tunix_core.sandbox import seccomp
from tunix_core.sandbox.results import SandboxResult

SECRET = "tunix-secret-7f3a"
PRELUDE = """
import ctypes, errno, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    return result, errno.errorcode.get(ctypes.get_errno(), "none")
def refused(attempt, *args):
    try:
        result = attempt(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return f"succeeded: {result!r}"
"""


def refusal(*accepted: str) -> Callable[[SandboxResult], bool]:
    """Every line that was printed is one of these error names."""

    def holds(result: SandboxResult) -> bool:
        lines = result.stdout.split()
        return result.ok and len(lines) > 0 and set(lines) <= set(accepted)

    return holds


def ends(*exits: str) -> Callable[[SandboxResult], bool]:
    return lambda result: result.exit in exits


def prints(text: str) -> Callable[[SandboxResult], bool]:
    return lambda result: result.ok and result.stdout.strip() == text


class Case(NamedTuple):
    source: str
    contained: Callable[[SandboxResult], bool]
    limits: dict[str, Any] = {}  # noqa: RUF012


def system_call(name: str, *arguments: object) -> Case:
    """One that ends the process at once."""
    number = seccomp.FORBIDDEN[name][seccomp.architecture().column]
    return Case(f"print(call({number}, {', '.join(map(str, arguments))}))", ends("forbidden"))


def number_of(name: str) -> int | None:
    return {**seccomp.ALLOWED, **seccomp._ABSENT}[name][seccomp.architecture().column]


IPC_NUMBERS = {"x86_64": (29, 64, 68, 240), "aarch64": (194, 190, 186, 180)}[platform.machine()]
"""shmget, semget, msgget, mq_open."""
SHORT = {"wall_seconds": 0.4}

CASES: dict[str, Case] = {
    # the zygote and the host's processes
    "read_zygote_memory": Case("print(refused(open, '/proc/1/mem', 'rb'))", refusal("ENOENT", "EACCES")),
    "write_zygote_memory": Case("print(refused(open, '/proc/1/mem', 'r+b'))", refusal("ENOENT", "EACCES")),
    "read_zygote_by_system_call": system_call("process_vm_readv", 1, 0, 0, 0, 0, 0),
    "write_zygote_by_system_call": system_call("process_vm_writev", 1, 0, 0, 0, 0, 0),
    "take_zygote_descriptor": system_call("pidfd_getfd", 3, 3, 0),
    "trace_zygote": system_call("ptrace", 16, 1, 0, 0),
    "trace_me": system_call("ptrace", 0, 0, 0, 0),
    "environ_of_parent": Case("print(refused(open, f'/proc/{os.getppid()}/environ', 'rb'))", refusal("ENOENT", "EACCES")),
    "be_dumpable": Case("print(libc.prctl(3, 0, 0, 0, 0), libc.prctl(4, 1, 0, 0, 0), libc.prctl(3, 0, 0, 0, 0))", prints("0 -1 0")),
    "kill_zygote": Case(
        "for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGSEGV):\n"
        " os.kill(1, s)\nos.kill(os.getppid(), 9)\nprint('done')",
        prints("done"),
    ),
    "kill_host_processes": Case(
        "found = [p for p in range(2, 60000) if p not in (os.getpid(),) and refused(os.kill, p, 0) != 'ESRCH']\nprint(found)",
        prints("[]"),
    ),
    "kill_all": Case("print(refused(os.kill, -1, 9))", refusal("ESRCH")),
    "kill_own_group": Case("os.killpg(0, 9)", ends("signal")),
    "limits_of_zygote": Case(f"print(call({number_of('prlimit64')}, 1, 7, 0, 0)[1])", refusal("EPERM")),
    "priority_of_zygote": Case("print(refused(os.setpriority, os.PRIO_PROCESS, 1, 19))", refusal("EPERM")),
    # privileges
    "become_root": Case("for f in (os.setuid, os.setgid): print(refused(f, 0))", refusal("EPERM")),
    "uid_is_not_root": Case("print(os.getuid(), os.geteuid(), os.getgroups())", lambda r: r.stdout.startswith("1000 1000")),
    "raise_own_limits": Case(
        "import resource as r\n"
        "for k in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        " try: r.setrlimit(k, (r.RLIM_INFINITY,) * 2); print('raised', k)\n"
        " except (ValueError, OSError): print('EPERM')",
        refusal("EPERM"),
    ),
    "user_namespace": system_call("unshare", 0x10000000),
    "join_namespace": system_call("setns", 0, 0),
    "clone_with_namespaces": Case(
        "".join(f"print(call({number_of('clone')}, {flag} | 17, 0, 0, 0, 0)[1])\n" for flag in (1 << 28, 1 << 17, 1 << 29, 1 << 30, 1 << 27)),
        refusal("EPERM"),
    ),
    "clone3": Case("print(call(435, ctypes.create_string_buffer(88), 88)[1])", refusal("ENOSYS")),
    "mount": system_call("mount", 0, 0, 0, 0, 0),
    "umount": system_call("umount2", "b'/tmp'", 2),
    "new_mount_interface": system_call("fsopen", "b'tmpfs'", 0),
    "pivot_root": system_call("pivot_root", "b'/tmp'", "b'/tmp'"),
    "chroot": Case("print(refused(os.chroot, '/tmp'))", refusal("EPERM")),
    "execute": Case(
        "import subprocess\nprint(refused(os.execv, '/python/bin/python3', ['python3']))\n"
        "print(refused(subprocess.run, ['/python/bin/python3', '-c', '1']))",
        refusal("EPERM"),
    ),
    "execute_own_binary": Case(
        "open('x', 'wb').write(open('/python/bin/python3', 'rb').read(4096)); os.chmod('x', 0o4755)\nprint(refused(os.execv, './x', ['x']))",
        refusal("EPERM"),
    ),
    # the kernel's larger doors
    "bpf": system_call("bpf", 0, 0, 0),
    "io_uring": system_call("io_uring_setup", 8, 0),
    "perf": system_call("perf_event_open", 0, 0, -1, -1, 0),
    "keyrings": system_call("keyctl", 0, -3, 0),
    "add_key": system_call("add_key", "b'user'", "b'x'", "b'y'", 1, -3),
    "userfaultfd": system_call("userfaultfd", 0),
    "vmsplice": system_call("vmsplice", 1, 0, 0, 0),
    "handles": system_call("open_by_handle_at", -1, 0, 0),
    "modules": system_call("init_module", 0, 0, "b''"),
    "kexec": system_call("kexec_load", 0, 0, 0, 0),
    "reboot": system_call("reboot", 0xFEE1DEAD, 672274793, 0, 0),
    "kernel_log": system_call("syslog", 3, 0, 0),
    "personality": Case("print(libc.personality(0x0040000), errno.errorcode[ctypes.get_errno()])", prints("-1 EPERM")),
    "loosen_seccomp": Case("print(libc.prctl(22, 0, 0, 0, 0), libc.prctl(22, 1, 0, 0, 0), libc.prctl(38, 0, 0, 0, 0))", prints("-1 -1 -1")),
    "unknown_system_call": Case("print(call(500)[1], call(1023)[1])", prints("ENOSYS ENOSYS")),
    **(
        {
            "system_call_of_32_bits": Case(
                "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"  # getpid through int 0x80
                "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())",
                ends("forbidden"),
            )
        }
        if platform.machine() == "x86_64"
        else {}
    ),
    "x32": Case("print(call(0x40000000 | 39))", ends("forbidden")),
    "terminal_input": Case("import fcntl\nprint(refused(fcntl.ioctl, 1, 0x5412, b'x'))", refusal("ENOTTY")),
    # network
    **{
        f"network_{name}": Case(f"print(refused(socket.socket, {family}, {kind}))", refusal("EPERM", "EAFNOSUPPORT"))
        for name, family, kind in (
            ("inet", 2, 1),
            ("inet_datagram", 2, 2),
            ("inet6", 10, 1),
            ("unix", 1, 1),
            ("netlink", 16, 3),
            ("packet", 17, 3),
            ("vsock", 40, 1),
            ("alg", 38, 5),
        )
    },
    "network_pair_of_other_family": Case(f"print(call({number_of('socketpair')}, 2, 1, 0, ctypes.create_string_buffer(8))[1])", refusal("EPERM")),
    "network_connect_on_a_pair": Case(
        "a, b = socket.socketpair()\nprint(refused(a.connect, '\\0x'), refused(a.bind, '\\0x'), refused(a.setsockopt, 1, 26, b'0' * 16))",
        refusal("EPERM"),
    ),
    "network_names": Case("print(refused(socket.create_connection, ('127.0.0.1', 80), 1))", refusal("EPERM")),
    # the host's files
    **{
        f"read_{name}": Case(f"print(refused(open, {path!r}, 'rb'))", refusal("ENOENT", "EACCES"))
        for name, path in (
            ("shadow", "/etc/shadow"),
            ("passwd", "/etc/passwd"),
            ("home", str(Path.home() / ".bashrc")),
            ("this_file", __file__),
            ("memory_device", "/dev/mem"),
            ("disk", "/dev/vda"),
            ("kvm", "/dev/kvm"),
            ("fuse", "/dev/fuse"),
            ("terminal", "/dev/tty"),
            ("system", "/sys/kernel"),
            ("kernel_core", "/proc/kcore"),
            ("own_root", "/proc/self/root/etc/passwd"),
            ("root_of_1", "/proc/1/root/etc/passwd"),
            ("directory_of_1", "/proc/1/cwd"),
            ("descriptor_of_1", "/proc/1/fd/3"),
            ("thread_link", "/proc/thread-self/root"),
            ("sysrq", "/proc/sysrq-trigger"),
            ("cgroups", "/sys/fs/cgroup/cgroup.procs"),
            ("old_root", "/oldroot"),
        )
    },
    "climb": Case("print(refused(open, '/tmp/work/' + '../' * 30 + 'etc/passwd'))", refusal("ENOENT")),
    "links_out": Case("os.symlink('/proc/self/root/etc/passwd', 'l'); print(refused(open, 'l'))", refusal("ENOENT")),
    "device_node": Case("import stat\nprint(refused(os.mknod, 'm', stat.S_IFBLK | 0o666, os.makedev(8, 0)))", refusal("EPERM")),
    "write_read_only_root": Case(
        "for p in ('/x', '/python/x', '/python/lib/x', '/dev/x', '/python/app/tunix_core/sandbox/inside/wire.py', os.__file__, '/lib64/x'):\n"
        " print(refused(open, p, 'w'))",
        refusal("EROFS", "EACCES"),
    ),
    "poison_bytecode": Case(
        "folder = os.path.dirname(os.__file__)\nprint(refused(os.mkdir, folder + '/__pycache__x'), refused(os.unlink, os.__file__))\n"
        "for part in ('site-packages/evil.pth', '__pycache__/evil.pyc'): print(refused(open, f'{folder}/{part}', 'w'))",
        refusal("EROFS", "EACCES", "ENOENT"),
    ),
    "environment": Case("print(sorted(os.environ))", prints("['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR', 'TZ']")),
    "open_descriptors": Case("print([n for n in range(3, 60) if refused(os.fstat, n) != 'EBADF'])", prints("[]")),
    # too much of everything
    "fork_bomb": Case("import os\nwhile True:\n try: os.fork()\n except OSError: pass", ends("timeout"), SHORT),
    "threads": Case(
        "import threading\nfor i in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        lambda r: r.exit == "error" and "can't start new thread" in r.stderr,
    ),
    "count_of_processes": Case(
        "n = 0\ntry:\n while n < 500:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\nexcept OSError: pass\nprint(n)", prints("15")
    ),
    "memory_of_one": Case("x = []\nwhile True: x.append(bytearray(1 << 20))", ends("memory")),
    "memory_mapped": Case("import mmap\nmmap.mmap(-1, 1 << 34)", lambda r: r.exit == "error" and "allocate" in r.stderr),
    "output": Case("while True: os.write(1, b'x' * 65536)", ends("output")),
    "error_output": Case("while True: os.write(2, b'x' * 65536)", ends("output")),
    "output_of_a_child": Case("if os.fork() == 0:\n while True: os.write(1, b'x' * 65536)\ntime.sleep(60)", ends("output")),
    "fill_tmp": Case(
        "for i in range(60):\n n = os.open(f'f{i}', os.O_CREAT | os.O_WRONLY); os.write(n, b'x' * (1 << 20)); os.close(n)",
        lambda r: r.exit == "error" and "No space left" in r.stderr,
    ),
    "fill_shared_memory": Case(
        "for i in range(60): open(f'/dev/shm/f{i}', 'wb').write(b'x' * (1 << 20))", lambda r: r.exit == "error" and "No space" in r.stderr
    ),
    "many_files": Case("for i in range(100000): open(f'f{i}', 'w').close()", lambda r: r.exit == "error" and "No space left" in r.stderr),
    "huge_file": Case("with open('f', 'wb') as f: f.truncate(1 << 33)", lambda r: r.exit == "error" and "too large" in r.stderr),
    "many_open_files": Case("x = [open('/dev/null') for _ in range(1000)]", lambda r: r.exit == "error" and "Too many open files" in r.stderr),
    "hidden_memory": Case("print(refused(os.memfd_create, 'x'))", refusal("EPERM")),
    "many_small_memories": Case(
        "for _ in range(12):\n if os.fork() == 0:\n  x = bytearray(60 << 20)\n  time.sleep(60)\n"
        "for _ in range(12): os.waitpid(-1, 0)",
        ends("timeout", "ok"),  # the parent is not killed by what happens to its children
        SHORT,
    ),
    "sysv_and_message_queues": Case(
        "".join(f"print(call({number}, 1, 4096, 0o1600, 0)[1])\n" for number in IPC_NUMBERS),
        refusal("EPERM"),
    ),
    "locked_memory": Case("print(libc.mlockall(3))", prints("-1")),
    "cpu": Case("while True: pass", ends("cpu"), {"cpu_seconds": 1}),
    "cpu_signal_ignored": Case("signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", ends("cpu"), {"cpu_seconds": 1}),
    # not ending
    "sleep": Case("time.sleep(1e6)", ends("timeout"), SHORT),
    "ignore_signals": Case(
        "for s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(1)",
        ends("timeout"),
        SHORT,
    ),
    "stop_itself": Case("os.kill(os.getpid(), signal.SIGSTOP)", ends("timeout"), SHORT),
    "hang_at_exit": Case("import atexit\natexit.register(time.sleep, 1e6)", ends("timeout"), SHORT),
    "threads_that_stay": Case("import threading\nthreading.Thread(target=time.sleep, args=(1e6,)).start()", ends("timeout"), SHORT),
    "children_that_stay": Case(
        "for i in range(5):\n if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n   time.sleep(1e6)\n  os._exit(0)\nprint('left')", prints("left")
    ),
    # odd ends
    "segmentation_fault": Case("ctypes.string_at(0)", lambda r: r.exit == "signal" and r.exit_code == -signal.SIGSEGV),
    "deep_recursion": Case("sys.setrecursionlimit(10 ** 9)\nf = lambda x: f(x)\nclass A:\n  def __getattr__(s, n): return getattr(s, n)\nA().x", ends("signal", "error", "memory")),
    "close_everything": Case("os.closerange(0, 1000)\nos._exit(3)", lambda r: r.exit_code == 3),
    "write_to_every_descriptor": Case(
        "for n in range(0, 200):\n for m in (b'R', b'K', b'\\0' * 21, b'\\x01' + b'\\0' * 20, b'\\xff' * 8):\n  try: os.write(n, m)\n  except OSError: pass",
        ends("ok"),
    ),
    "exit_with_text": Case("sys.exit('done')", lambda r: (r.exit, r.exit_code, r.stderr) == ("error", 1, "done\n")),
    "exit_with_256": Case("sys.exit(256)", lambda r: r.exit_code == 0),
    "exit_with_object": Case("class E(int):\n  def __and__(s, o): raise SystemExit(s)\nsys.exit(E(3))", ends("error", "ok")),
    "exit_without_cleanup": Case("print('x', flush=True)\nos._exit(0)", prints("x")),
    "exit_in_thread": Case("import threading\nthreading.Thread(target=os._exit, args=(4,)).start()\ntime.sleep(60)", lambda r: r.exit_code == 4),
    "raise_strange": Case("class E(BaseException):\n  def __str__(s): raise E\n  __repr__ = __str__\nraise E", ends("error")),
    "break_interpreter": Case("sys.modules.clear()\n__builtins__.__dict__.clear() if hasattr(__builtins__, '__dict__') else 0\nsys.stdout = None", ends("ok", "error")),
    "no_text": Case("os.write(1, bytes(range(256)))", lambda r: r.ok and "\ufffd" in r.stdout),
}  # fmt: skip


def identities(sandboxes: Sandboxes) -> set[int]:
    return {slot._process.pid for slot in sandboxes.pool._slots if slot._process is not None}


async def in_every_slot(sandboxes: Sandboxes, source: str) -> list[SandboxResult]:
    """At once, so that each sandbox has one."""
    return list(await asyncio.gather(*(sandboxes.pool.run(source) for _ in range(sandboxes.pool.config.num_slots))))


LEFTOVERS = """
import os
print(sorted(os.listdir('/tmp')), os.listdir('/tmp/work'), os.listdir('/tmp/shm'), end=' ')
try: os.kill(-1, 0)
except ProcessLookupError: print('alone')
"""


@pytest.mark.parametrize("name", CASES)
def test_an_attempt_is_contained(sandboxes: Sandboxes, name: str) -> None:
    case = CASES[name]
    before = identities(sandboxes)
    result = sandboxes.run(PRELUDE + case.source, limits=dataclasses.replace(QUICK, **case.limits))
    assert case.contained(result), result
    for after in sandboxes.wait(in_every_slot(sandboxes, LEFTOVERS)):
        assert after.stdout == "['shm', 'work'] [] [] alone\n", after
    assert identities(sandboxes) == before
    assert sandboxes.pool.counters.num_replaced == 0
