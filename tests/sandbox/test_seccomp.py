"""The filter's answers, by an interpreter of its instructions, for both architectures on any."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import pytest

from tunix_core.errors import ConfigError
from tunix_core.sandbox import seccomp

MACHINES = list(seccomp.ARCHITECTURES)


@functools.cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", seccomp.program(seccomp.ARCHITECTURES[machine])))


def answer(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would do, following the classic BPF of linux/filter.h."""
    arch = seccomp.ARCHITECTURES[machine]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, arch.audit if audit is None else audit, 0, *padded)
    steps = instructions(machine)
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x05:
            position += value
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false


def number(name: str, machine: str) -> int | None:
    tables = {**seccomp.ALLOWED, **seccomp.FORBIDDEN, **seccomp._ABSENT}
    return tables[name][seccomp.ARCHITECTURES[machine].column]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_has_the_answer_of_its_table(machine: str) -> None:
    column = seccomp.ARCHITECTURES[machine].column
    conditional = {"clone", "socketpair", "ioctl", "prctl", "prlimit64"}
    expected = dict.fromkeys(range(463), seccomp.REFUSED)
    for name, numbers in seccomp.ALLOWED.items():
        if numbers[column] is not None and name not in conditional:
            expected[numbers[column]] = seccomp.ALLOW
    expected |= {
        numbers[column]: seccomp.KILL_PROCESS for numbers in seccomp.FORBIDDEN.values() if numbers[column] is not None
    }
    expected[435] = seccomp.UNKNOWN
    skipped = {number(name, machine) for name in conditional}
    assert {n: answer(machine, n) for n in expected if n not in skipped} == {
        n: a for n, a in expected.items() if n not in skipped
    }
    assert {answer(machine, n) for n in (463, 500, 1023, 0x3FFFFFFF)} == {seccomp.UNKNOWN}
    assert {answer(machine, 0x40000000 + n) for n in (0, 39, 512)} == {seccomp.KILL_PROCESS}
    assert answer(machine, 0xFFFFFFFF) == seccomp.KILL_PROCESS


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architectures_calls_end_the_process(machine: str) -> None:
    for audit in (0x40000003, 0x40000028, 0, *(a.audit for m, a in seccomp.ARCHITECTURES.items() if m != machine)):
        assert {answer(machine, n, audit=audit) for n in range(463)} == {seccomp.KILL_PROCESS}


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine: str) -> None:
    def ask(name: str, *arguments: int) -> int:
        found = number(name, machine)
        assert found is not None
        return answer(machine, found, *arguments)

    assert ask("clone", 0x01200011) == ask("clone", 0x3D0F00) == seccomp.ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask("clone", flag | 0x11) == seccomp.REFUSED
    assert ask("socketpair", 1) == seccomp.ALLOW
    assert ask("socketpair", 2) == seccomp.REFUSED
    assert ask("ioctl", 1, 0x5401) == ask("ioctl", 1, 0x5421) == seccomp.ALLOW
    assert ask("ioctl", 1, 0x5412) == seccomp.NOT_A_TERMINAL
    assert ask("prctl", 15) == seccomp.ALLOW
    assert ask("prctl", 4) == ask("prctl", 22) == ask("prctl", 38) == seccomp.REFUSED
    assert ask("prlimit64", 0, 7) == seccomp.ALLOW
    assert ask("prlimit64", 1, 7) == seccomp.REFUSED


def test_no_call_is_in_two_tables_and_no_number_has_two_names() -> None:
    tables = (seccomp.ALLOWED, seccomp.FORBIDDEN, seccomp._ABSENT)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    for column in (0, 1):
        numbers = [found[column] for table in tables for found in table.values() if found[column] is not None]
        assert len(numbers) == len(set(numbers))


HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.mark.skipif(not HEADER.exists(), reason="the kernel's headers are not installed")
def test_numbers_are_those_of_the_kernels_header() -> None:
    words = [line.split() for line in HEADER.read_text().splitlines() if line.startswith("#define __NR_")]
    header = {name.removeprefix("__NR_"): int(value) for _, name, value in words}
    for table in (seccomp.ALLOWED, seccomp.FORBIDDEN, seccomp._ABSENT):
        assert {name: numbers[0] for name, numbers in table.items()} == {
            name: header.get(name, numbers[0] if name in seccomp.FORBIDDEN else None) for name, numbers in table.items()
        }


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted x86_64, aarch64"):
        seccomp.architecture("riscv64")
