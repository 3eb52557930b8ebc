"""The seccomp filter of the sandbox, interpreted as in the kernel, for both architectures on any machine."""

import errno
import re
import struct
from pathlib import Path

import pytest

from rlhf_cli.rewards.sandbox.filter import ALLOWED, ALLOWED_WITH, COLUMN, seccomp_filter

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, NOT_THERE, NOT_PERMITTED, KILLED = "allowed", errno.ENOSYS, errno.EPERM, "killed"


def decision(code: bytes, arch: int, number: int, *arguments: int) -> str | int:
    """Interpret the BPF instructions of a seccomp filter and return its decision on a system call."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("=IIQ6Q", number, arch, 0, *values)
    instructions = list(struct.iter_unpack("=HBBI", code))
    accumulator = place = 0
    while True:
        operation, if_true, if_false, value = instructions[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", call, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation in (0x15, 0x35):
            place += if_true if (accumulator == value if operation == 0x15 else accumulator >= value) else if_false
        else:
            assert operation == 0x06
            return {0x7FFF0000: ALLOW, 0x80000000: KILLED}.get(value, value & 0xFFFF)


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize(
    ("x86", "arm", "arguments", "answer"),
    [
        (0, 63, (), ALLOW),  # read
        (257, 56, (), ALLOW),  # openat
        (59, 221, (), ALLOW),  # execve
        (231, 94, (), ALLOW),  # exit_group
        (56, 220, (0x3D0F00,), ALLOW),  # clone, as pthread_create calls it
        (56, 220, (0x1200011,), NOT_PERMITTED),  # as fork does
        (56, 220, (0x4111,), NOT_PERMITTED),  # as vfork does
        (56, 220, (0x10010900,), NOT_PERMITTED),  # a thread in a new user namespace
        (56, 220, (0x30900,), NOT_PERMITTED),  # in a new mount namespace
        (435, 435, (), NOT_THERE),  # clone3
        (302, 261, (0, 7), ALLOW),  # prlimit64 of the process itself
        (302, 261, (1, 7), NOT_PERMITTED),
        (16, 29, (0, 0x5401), ALLOW),  # ioctl TCGETS
        (16, 29, (0, 0x5412), NOT_PERMITTED),  # TIOCSTI
        (53, 199, (1, 1), ALLOW),  # socketpair AF_UNIX
        (53, 199, (16, 3), NOT_PERMITTED),  # AF_NETLINK
        (41, 198, (2, 1), NOT_THERE),  # socket
        (272, 97, (0x10000000,), NOT_THERE),  # unshare
        (165, 40, (), NOT_THERE),  # mount
        (101, 117, (), NOT_THERE),  # ptrace
        (321, 280, (), NOT_THERE),  # bpf
        (425, 425, (), NOT_THERE),  # io_uring_setup
        (999, 999, (), NOT_THERE),
    ],
)
def test_calls_are_decided(machine, x86, arm, arguments, answer):
    number = x86 if machine == "x86_64" else arm
    assert decision(seccomp_filter(machine), ARCH[machine], number, *arguments) == answer


@pytest.mark.parametrize("machine", ARCH)
def test_other_architectures_are_killed(machine):
    code = seccomp_filter(machine)
    others = [arch for name, arch in ARCH.items() if name != machine] + [0x40000003, 0x40000028]  # i386, arm
    assert [decision(code, arch, 0) for arch in others] == [KILLED] * 3
    assert decision(code, ARCH[machine], 0x40000000) == KILLED  # read of x32


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_those_of_the_kernels_headers(machine, header):
    if not Path(header).is_file():
        pytest.skip(f"{header} is not on this machine")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    numbers.setdefault("newfstatat", numbers.get("fstatat", ""))  # its name on architectures with one variant
    lines = [line.split() for line in ALLOWED.split(",")] + [call.split() for call, *_ in ALLOWED_WITH]
    listed = {line[0]: line[COLUMN[machine]] for line in lines if line[COLUMN[machine]] != "-"}
    assert listed == {name: numbers.get(name) for name in listed}
    code = seccomp_filter(machine)
    others = [0x7FFFFFFF] * 6  # arguments that are never allowed
    through = {int(n) for n in numbers.values() if decision(code, ARCH[machine], int(n), *others) == ALLOW}
    with_arguments = {call.split()[0] for call, *_ in ALLOWED_WITH}
    assert through == {int(number) for name, number in listed.items() if name not in with_arguments}
