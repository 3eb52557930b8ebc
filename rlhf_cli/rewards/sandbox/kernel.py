"""Linux system calls for launcher.py that have no function in Python. Each raises OSError that names the call.

Keep imports minimal: every sandboxed program loads this module again.
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

MS_NOSUID, MS_NODEV, _MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000

# For mount_setattr, which adds attributes. A remount would have to repeat all existing ones.
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
# Upper bound: capability sets have 64 bits.
_NUM_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(namespaces: int) -> None:
    """Move this process to new namespaces. A new PID namespace applies only to children."""
    _check("unshare", _libc.unshare(namespaces))


def set_host_name(name: bytes) -> None:
    _check("sethostname", _libc.sethostname(name, len(name)))


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [os.fsencode(text) if text else None for text in (source, target, kind)]
    _check("mount", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), target)


def bind(source: str, target: str, attributes: int) -> None:
    """Bind-mount a file or folder recursively and add mount attributes."""
    # Two steps, because the kernel ignores most attribute flags in the bind call itself.
    mount(source, target, flags=_MS_BIND | MS_REC)
    set_attributes(target, attributes, flags=_AT_RECURSIVE)


def set_attributes(target: str, attributes: int, *, flags: int = 0) -> None:
    """Add attributes to a mount."""
    # struct mount_attr: attributes to set, to clear, propagation, user namespace.
    mount_attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(mount_attr))
    status = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, mount_attr, size)
    _check("mount_setattr", status, target)


def detach(target: str) -> None:
    """Unmount lazily at this path. Other bind mounts remain."""
    _check("umount", _libc.umount2(os.fsencode(target), _MNT_DETACH), target)


def change_root(folder: str) -> None:
    """Make a mount point the root of this mount namespace and unmount everything else."""
    # pivot_root(".", ".") stacks the old root on top of the new one, so it needs no folder for the old root.
    os.chdir(folder)
    _check("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
    detach(".")
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Receive a signal when the parent thread exits. No-op outside Linux."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal)


def hide_from_debuggers() -> None:
    """Prevent unprivileged processes from attaching to this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def empty_bounding_set() -> None:
    """Drop all capabilities for programs executed from now on."""
    for capability in range(_NUM_CAPABILITIES):
        # Fails past the last capability that this kernel has.
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break


def drop_capabilities() -> None:
    """Drop all capabilities irrevocably: executing a program cannot regain any (no_new_privs)."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(code: bytes) -> None:
    """Install a seccomp filter for all further system calls. Requires no_new_privs or privileges."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    # struct sock_fprog; each instruction has 8 bytes.
    program = Program(len(code) // 8, code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def _prctl(option: int, *arguments: object) -> None:
    # The kernel reads all arguments as longs and rejects some options unless unused ones are 0.
    longs = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check("prctl", _libc.prctl(option, *longs))


def _check(call: str, status: int, path: str | None = None) -> None:
    if status != 0:
        number = ctypes.get_errno()
        where = "" if path is None else f" {path}"
        raise OSError(number, f"{call}{where}: {os.strerror(number)}")
