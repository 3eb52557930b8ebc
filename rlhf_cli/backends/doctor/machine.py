"""Checks of the machine: memory, shared memory, limits, disk, compilers and the sandbox for code rewards."""

import os
import platform
import resource
import shutil
import sysconfig
import tempfile
from pathlib import Path

from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.backends.process.killed import total_memory, usable_memory
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.sandbox.run import require_sandbox

GIB = 1 << 30
_LEAST_MEMORY = 8 * GIB
_LEAST_SHARED_MEMORY = 1 * GIB
"""For Ray's object store and weight pushes of a small model. Pushing a 7B model requires 15 GB."""
_LEAST_OPEN_FILES = 4096
"""Ray opens several files per worker process. Many Linux systems allow 1,024."""
_LEAST_PROCESSES = 4096
"""Includes threads. Ray, vLLM and PyTorch start hundreds per worker process."""
_LEAST_DISK = 20 * GIB


def machine_findings() -> list[Finding]:
    """Run all checks of this machine."""
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ok("processor", f"{len(os.sched_getaffinity(0))} cores"),
        memory_finding(total_memory(), usable=usable_memory()),
        shared_memory_finding(shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None),
        open_files_finding(soft_files),
        processes_finding(soft_processes),
        locked_memory_finding(soft_locked, has_infiniband=Path("/dev/infiniband").is_dir()),
        *(disk_finding(name, folder, free=shutil.disk_usage(folder).free) for name, folder in _folders().items()),
        compiler_finding(shutil.which("g++") or shutil.which("clang++"), has_headers=_has_python_headers()),
        _sandbox_finding(),
    ]


def memory_finding(total: int, *, usable: int) -> Finding:
    """Check the memory of the machine, of which a container's limit leaves `usable`, both in bytes."""
    message = f"{usable / GIB:.0f} GiB" + (" (the container's limit)" if usable < total else "")
    if usable >= _LEAST_MEMORY:
        return ok("memory", message)
    cure = "use a smaller model, --rollout_backend transformers, or a machine with more memory"
    return Finding("memory", "warning", f"{message}: an online run with a small model requires about 8 GiB", cure)


def shared_memory_finding(free: int | None) -> Finding:
    """Check the free space in /dev/shm in bytes; `free` is None if the folder does not exist."""
    if free is not None and free >= _LEAST_SHARED_MEMORY:
        return ok("shared memory", f"{free / GIB:.1f} GiB free in /dev/shm")
    message = "no /dev/shm" if free is None else f"{free / GIB:.2f} GiB free in /dev/shm"
    cure = "docker run --shm-size 16g ..., or mount -o remount,size=16g /dev/shm"
    return Finding("shared memory", "warning", f"{message}: Ray and weight pushes use the disk instead", cure)


def open_files_finding(soft_limit: int) -> Finding:
    """Check the limit for open files per process."""
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= _LEAST_OPEN_FILES:
        return ok("open files", "no limit" if soft_limit == resource.RLIM_INFINITY else f"limit {soft_limit:,}")
    message = f"a process may open {soft_limit:,} files; Ray requires more on a machine with multiple GPUs"
    return Finding("open files", "warning", message, "ulimit -n 65536")


def processes_finding(soft_limit: int) -> Finding:
    """Check the limit for processes and threads per user."""
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= _LEAST_PROCESSES:
        return ok("processes", "no limit" if soft_limit == resource.RLIM_INFINITY else f"limit {soft_limit:,}")
    message = f"a user may have {soft_limit:,} processes and threads; Ray and vLLM start thousands on a large machine"
    return Finding("processes", "warning", message, "ulimit -u 65536")


def locked_memory_finding(soft_limit: int, *, has_infiniband: bool) -> Finding:
    """Check the limit for locked memory in bytes, which NCCL over InfiniBand uses."""
    if soft_limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    message = f"limit {soft_limit >> 10:,} KiB"
    if not has_infiniband:
        return ok("locked memory", message)
    cure = "ulimit -l unlimited, or docker run --ulimit memlock=-1 ..."
    return Finding("locked memory", "warning", f"{message}: NCCL over InfiniBand requires more", cure)


def _folders() -> dict[str, Path]:
    """Return the folders that runs write to, by display name."""
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    # The cache may not exist yet, so measure the disk of the nearest existing parent.
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    return {"disk here": Path.cwd(), "temporary files": Path(tempfile.gettempdir()), "model cache": existing}


def disk_finding(name: str, folder: Path, *, free: int) -> Finding:
    """Check the free disk space in bytes."""
    message = f"{free / GIB:.0f} GiB free in {folder}"
    if free >= _LEAST_DISK:
        return ok(name, message)
    cure = {"temporary files": "export TMPDIR=/a/larger/folder", "model cache": "export HF_HOME=/a/larger/folder"}
    default = "remove old checkpoints, or set --output to a folder on a larger disk"
    message += "; a checkpoint of a 7B model needs about 100 GB"
    return Finding(name, "warning", message, cure.get(name, default))


def _has_python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def compiler_finding(compiler: str | None, *, has_headers: bool) -> Finding:
    """Check whether the CPU attention kernel and DeepSpeed's CPU operators can be compiled."""
    if compiler is None:
        message = "no C++ compiler: attention on the CPU uses PyTorch's operators, which are slower"
        return Finding("C++ compiler", "warning", message, "apt-get install g++")
    if not has_headers:
        message = f"{compiler}, but no Python.h, which is required to compile DeepSpeed's CPU operators"
        return Finding("C++ compiler", "warning", message, f"apt-get install python{_short_version()}-dev")
    return ok("C++ compiler", compiler)


def _short_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _sandbox_finding() -> Finding:
    """Check whether the `code` reward can run model-generated programs on this machine."""
    try:
        require_sandbox()
    except UsageError as error:
        cure = "read docs/sandbox.md; all other rewards work without the sandbox"
        return Finding("code sandbox", "warning", f"--reward_funcs code does not work here: {error}", cure)
    return ok("code sandbox", "model-generated programs can run here")
