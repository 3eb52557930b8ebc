"""The system calls of Linux that the sandbox is made of and Python has no function for. Each raises OSError, named.

launcher.py uses them. Imports little: it is loaded anew for every program that is run.
"""

import ctypes
import os
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000

# mount_setattr: attributes are added to those a mount has, which a mere remount would have to repeat.
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64  # more than there are

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(namespaces: int) -> None:
    """Move this process to new namespaces (for the namespace of process ids, its children)."""
    _check("unshare", _libc.unshare(namespaces))


def set_host_name(name: bytes) -> None:
    _check("sethostname", _libc.sethostname(name, len(name)))


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [os.fsencode(text) if text else None for text in (source, target, kind)]
    _check("mount", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), target)


def bind(source: str, target: str, attributes: int) -> None:
    """Show a file or folder with all mounts in it at another place, with more attributes than it has."""
    mount(source, target, flags=MS_BIND | MS_REC)
    set_attributes(target, attributes, flags=_AT_RECURSIVE)


def set_attributes(target: str, attributes: int, *, flags: int = 0) -> None:
    """Add attributes to a mount."""
    mount_attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # to set, to clear, propagation, user namespace
    size = ctypes.c_size_t(ctypes.sizeof(mount_attr))
    status = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, mount_attr, size)
    _check("mount_setattr", status, target)


def detach(target: str) -> None:
    """Take a mount away from its place; it stays at its other places."""
    _check("umount", _libc.umount2(os.fsencode(target), _MNT_DETACH), target)


def change_root(folder: str) -> None:
    """Make a mounted folder the root of this namespace and let go of all other mounts."""
    os.chdir(folder)
    _check("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
    detach(".")  # the old root lies on top of the new one
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Get a signal when the thread that started this process is gone. Does nothing outside Linux."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal)


def hide_from_debuggers() -> None:
    """Let no process without privileges attach to this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def empty_bounding_set() -> None:
    """Give up all capabilities for every program that is executed from here on."""
    for capability in range(_NUM_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last one


def drop_capabilities() -> None:
    """Give up all capabilities of this process for good, and the gaining of any by executing a program."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(code: bytes) -> None:
    """Let a seccomp filter decide on every system call of this process from here on."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    program = Program(len(code) // 8, code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def _prctl(option: int, *arguments: object) -> None:
    longs = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check("prctl", _libc.prctl(option, *longs))


def _check(call: str, status: int, path: str | None = None) -> None:
    if status != 0:
        number = ctypes.get_errno()
        where = "" if path is None else f" {path}"
        raise OSError(number, f"{call}{where}: {os.strerror(number)}")
