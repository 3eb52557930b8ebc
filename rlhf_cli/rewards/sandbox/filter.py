"""Seccomp filter for the sandbox: an allowlist of system calls for a Python program, as BPF bytecode.

Other system calls fail with ENOSYS, which C libraries and Python handle like an old kernel. Excluded, among others, are
processes, namespaces, mounts, ptrace, other processes' memory, sockets other than socket pairs, keys, BPF, performance
counters, io_uring, userfaultfd, modules, kexec, clocks, swap, and System V memory and memfd, which no process limit
bounds. System calls through another ABI (i386, x32) kill the program.

Pure functions: `install_filter` in kernel.py installs the bytes.
"""

import errno
import struct

# Name, number on x86_64, number on aarch64 ("-" if it has no such call), from the kernel's unistd_64.h and
# asm-generic/unistd.h.
ALLOWED = """
    read 0 63, write 1 64, close 3 57, open 2 -, openat 257 56, lseek 8 62, dup 32 23, dup2 33 -, dup3 292 24,
    pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286,
    pwritev2 328 287, pipe 22 -, pipe2 293 59, close_range 436 436, fcntl 72 25, flock 73 32, fsync 74 82,
    fdatasync 75 83, truncate 76 45, ftruncate 77 46, fadvise64 221 223, getdents 78 -, getdents64 217 61,
    stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -,
    faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50,
    mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38,
    renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, umask 95 166, getxattr 191 8,
    lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, madvise 28 233, brk 12 214,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128, pause 34 -, kill 62 129, tkill 200 130,
    tgkill 234 131, alarm 37 -, getitimer 36 102, setitimer 38 103,
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19, sendto 44 206, recvfrom 45 207,
    nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
    time 201 -, times 100 153, getpid 39 172, gettid 186 178, getppid 110 173, getpgid 121 155, getpgrp 111 -,
    getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
    getresgid 120 150, getgroups 115 158, getpriority 140 141, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
    uname 63 160, sysinfo 99 179, getcpu 309 168, getrandom 318 278, sched_yield 24 124, sched_getaffinity 204 123,
    futex 202 98, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293,
    arch_prctl 158 -, wait4 61 260, waitid 247 95, exit 60 93, exit_group 231 94, execve 59 221
"""

_THREAD = 0x00010000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags of clone

# System calls allowed only for certain argument values; otherwise EPERM. Columns: name and numbers, argument index, bit
# mask, allowed masked values.
ALLOWED_WITH = (
    # Threads but no processes, because resource limits are per process. clone3 is excluded: its flags are in memory,
    # which a filter cannot read. C libraries fall back to clone on ENOSYS.
    ("clone 56 220", 0, _THREAD | _NEW_NAMESPACES, (_THREAD,)),
    # Only for the calling process (pid 0).
    ("prlimit64 302 261", 0, 0xFFFFFFFF, (0,)),
    # AF_UNIX: asyncio uses a socket pair to wake up the event loop.
    ("socketpair 53 199", 0, 0xFFFFFFFF, (1,)),
    # FIONBIO, FIOCLEX, FIONCLEX, FIONREAD, TCGETS, TIOCGWINSZ: generic requests that Python makes on any file. Requests
    # to drivers and file systems are excluded.
    ("ioctl 16 29", 1, 0xFFFFFFFF, (0x5421, 0x5451, 0x5450, 0x541B, 0x5401, 0x5413)),
)

COLUMN = {"x86_64": 1, "aarch64": 2}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# BPF opcodes (linux/bpf_common.h) and filter return values (linux/seccomp.h).
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000

# Offsets in struct seccomp_data. Arguments have 8 bytes, lower half first on little-endian machines.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


def seccomp_filter(machine: str) -> bytes:
    """Build the filter for a `platform.machine()` name, as an array of `struct sock_filter`.

    Raises KeyError for machines other than x86_64 and aarch64.
    """
    column = COLUMN[machine]
    # Check the ABI first: the same number means another system call in i386, and x32 sets a bit in the number.
    code = [_jump(_EQUAL, _AUDIT_ARCH[machine], skip_if_false=0, skip_if_true=1), _return(_KILL)]
    code += [_instruction(_LOAD, _NUMBER), _jump(_AT_LEAST, _X32_BIT, skip_if_true=0, skip_if_false=1), _return(_KILL)]
    for line in ALLOWED.replace("\n", " ").split(","):
        number = line.split()[column]
        if number != "-":
            code += [_jump(_EQUAL, int(number), skip_if_true=0, skip_if_false=1), _return(_ALLOW)]
    for call, argument, mask, values in ALLOWED_WITH:
        check = _checked(argument, mask, values)
        code += [_jump(_EQUAL, int(call.split()[column]), skip_if_true=0, skip_if_false=len(check)), *check]
    return b"".join([_instruction(_LOAD, _ARCH), *code, _return(_ERRNO | errno.ENOSYS)])


def _checked(argument: int, mask: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow the call if the masked lower half of an argument is one of the values, otherwise return EPERM."""
    # The lower half is enough: the kernel ignores the upper 32 bits of these arguments.
    code = [_instruction(_LOAD, _ARGUMENTS + 8 * argument), _instruction(_AND, mask)]
    for value in values:
        code += [_jump(_EQUAL, value, skip_if_true=0, skip_if_false=1), _return(_ALLOW)]
    return [*code, _return(_ERRNO | errno.EPERM)]


def _jump(code: int, value: int, *, skip_if_true: int, skip_if_false: int) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)


def _instruction(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _return(answer: int) -> bytes:
    return _instruction(_RETURN, answer)
