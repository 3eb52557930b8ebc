"""Sandbox launcher: creates the sandbox, runs one untrusted program, and leaves nothing behind.

`run_program` in run.py starts it as a new minimal interpreter, so that it can fork. Processes:

    launcher   on the host, in new user, mount, network, IPC and UTS namespaces; kills at the time limit
    init       process 1 in a new PID namespace; when it exits, the kernel kills everything in the namespace
    program    with resource limits, without capabilities, behind the seccomp filter; executes a new Python

Protocol:

- stdin: the request.
- Arguments: file descriptors for a control pipe and a status pipe. Closing the control pipe kills the program.
- Status pipe: `{"error": ...}` if the sandbox could not be created. Otherwise `{"status": wait status, "seconds": ...}`
  or `{"ended": "time", "seconds": ...}` from the process that waits for the program.
- stdout and stderr belong to the program.

Messages are dicts in marshal format, which is safe because both sides run the same interpreter.
"""

import marshal
import os
import resource
import select
import signal
import time

from rlhf_cli.rewards.sandbox import kernel

# Importing typing would delay every sandboxed program.
_TYPE_CHECKING = False
if _TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypedDict

    class Request(TypedDict):
        """Program, limits, and either the root file system (`sandboxed`) or the working folder."""

        program: str
        stdin: str
        python: str
        sandboxed: bool
        seconds: float
        memory_bytes: int
        scratch_bytes: int
        max_files: int
        max_processes: int
        folders: list[str]
        hidden: list[str]
        links: list[tuple[str, str]]
        filter: bytes
        folder: str


_SCRATCH = "/box"
_PROGRAM = f"{_SCRATCH}/program.py"
# A regular file with the program's input, because programs open it by this name too.
_STDIN = "/dev/stdin"

# Temporary mount point for the new root: a folder that every machine has and that the sandbox does not need.
_MOUNT_POINT = "/proc"

# User and group ID inside the sandbox.
_INSIDE_ID = 1000
_MAX_INODES = 4096
# The root holds only empty folders and bind mount targets.
_ROOT_SIZE = 1 << 20
_STACK_SIZE = 8 << 20
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_SEALED = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID


def main(control: int, status: int) -> None:
    """Run the request from stdin. Takes the file descriptors of both pipes."""
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    os.umask(0o022)
    try:
        with open(0, "rb", closefd=False) as stream:
            request = marshal.load(stream)
        _run(request, control, status)
    except Exception as error:
        _report(status, error=_words(error))


def _run(request: "Request", control: int, status: int) -> None:
    wake = _wake_on_child()
    if request["sandboxed"]:
        _enter_namespaces()
        # The write end stays open in this process only: init sees the end of file if the launcher is gone.
        alive = os.pipe()
        child = _fork(lambda: _init(request, alive, status), status)
        os.close(alive[0])
    else:
        child = _fork(lambda: _unguarded(request), status)
    started = time.monotonic()
    ended = _wait(child, wake, control, deadline=started + request["seconds"])
    seconds = time.monotonic() - started
    if isinstance(ended, str):
        _kill(child, is_group=not request["sandboxed"])
        os.waitpid(child, 0)
        _report(status, ended=ended, seconds=seconds)
    elif not request["sandboxed"]:
        # Without a PID namespace, the program may leave processes behind.
        _kill_group(child)
        _report(status, status=ended, seconds=seconds)


def _wait(child: int, wake: int, control: int, *, deadline: float) -> int | str:
    """Wait for a child. Returns the wait status, or a reason to kill it: `time`, or `asked` by the control pipe."""
    waiting = select.poll()
    for descriptor in (wake, control):
        waiting.register(descriptor, select.POLLIN)
    while True:
        # Check before polling: a child that exits in between writes to `wake`, which ends the poll.
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            return ended
        events = dict(waiting.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if control in events:
            return "asked"
        if wake in events:
            os.read(wake, 512)
        elif time.monotonic() >= deadline:
            return "time"


def _wake_on_child() -> int:
    """Return a file descriptor that becomes readable when a child exits."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    # Any Python handler will do: without one, Python does not write to the wakeup descriptor.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _kill(child: int, *, is_group: bool) -> None:
    if is_group:
        _kill_group(child)
    # The child has not been reaped, so the pid cannot belong to another process.
    os.kill(child, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    try:  # noqa: SIM105 (importing contextlib takes longer than everything else here)
        os.killpg(leader, signal.SIGKILL)
    # macOS raises PermissionError if the group is gone.
    except (ProcessLookupError, PermissionError):
        pass


def _fork(run: "Callable[[], None]", status: int) -> int:
    """Fork a child that calls `run` and exits without returning. Returns the child's pid."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        # The kernel ignores signals with default action for process 1, but Python's handlers would interrupt it.
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        run()
        code = 0
    except BaseException as error:
        _report(status, error=_words(error))
    finally:
        os._exit(code)


def _words(error: BaseException) -> str:
    return str(error.strerror if isinstance(error, OSError) and error.filename is None else error)


def _report(report: int, **line: object) -> None:
    os.write(report, marshal.dumps(line))


# --- launcher: namespaces and user mapping


def _enter_namespaces() -> None:
    """Move to new namespaces, with the program's user mapped to a host user other than root."""
    _ask_kernel_to_take_this_first()
    other = _other_id() if os.geteuid() == 0 else None
    if other is None:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(_NAMESPACES)
        # The kernel requires this before an unprivileged process may write gid_map.
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_INSIDE_ID} {user} 1")
        _write("/proc/self/gid_map", f"{_INSIDE_ID} {group} 1")
    else:
        _enter_as_root(other)
    kernel.set_host_name(b"sandbox")


def _enter_as_root(other: int) -> None:
    """Enter as root, with the program mapped to another user: RLIMIT_NPROC does not apply to root."""
    # A process in the parent namespace must write the maps, since they map two users. It waits until `unshare` is done,
    # which the end of file on the pipe signals.
    launcher = os.getpid()
    entered, enter = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        try:
            os.close(enter)
            os.read(entered, 1)
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{launcher}/{name}", f"0 0 1\n{_INSIDE_ID} {other} 1")
        finally:
            os._exit(0)
    kernel.unshare(_NAMESPACES)
    os.close(enter)
    os.waitpid(mapper, 0)
    if os.geteuid() != 0:
        raise PermissionError("users in the new user namespace cannot be mapped (is CAP_SETUID missing?)")


def _other_id() -> int | None:
    """Return a non-root user ID on the host, `nobody` if possible; None if only root is mapped."""
    with open("/proc/self/uid_map") as lines:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    last = max(first + count - 1 for first, count in ranges)
    return None if last == 0 else min(last, 65534)


def _ask_kernel_to_take_this_first() -> None:
    """If the machine runs out of memory, let the kernel kill this process first, not the trainer."""
    _write("/proc/self/oom_score_adj", "1000")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# --- init: process 1 in the sandbox


def _init(request: "Request", alive: tuple[int, int], status: int) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    os.close(alive[1])
    # The launcher may have died before `die_with_parent` took effect: no signal comes then.
    if select.select([alive[0]], [], [], 0)[0]:
        return
    kernel.hide_from_debuggers()
    _make_root(request)
    started = time.monotonic()
    program = _fork(lambda: _program(request), status)
    # After the fork: the program still needs capabilities to change the user.
    kernel.empty_bounding_set()
    kernel.drop_capabilities()
    # Process 1 inherits orphans, so `wait` also returns other pids.
    while True:
        pid, ended = os.wait()
        if pid == program:
            break
    _report(status, status=ended, seconds=time.monotonic() - started)


def _make_root(request: "Request") -> None:
    """Build a tmpfs root with the interpreter, libraries, scratch folders and the program's input files."""
    sealed_folder = _SEALED | kernel.MOUNT_ATTR_NODEV
    # Private: otherwise these mounts would propagate to the host.
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    _mount_memory(_MOUNT_POINT, size=_ROOT_SIZE)
    for folder in request["folders"]:
        os.makedirs(_MOUNT_POINT + folder)
        kernel.bind(folder, _MOUNT_POINT + folder, sealed_folder)
    os.makedirs(f"{_MOUNT_POINT}/empty")
    for folder in request["hidden"]:
        kernel.bind(f"{_MOUNT_POINT}/empty", _MOUNT_POINT + folder, sealed_folder)
    for path, target in request["links"]:
        os.symlink(target, _MOUNT_POINT + path)
    for device in _DEVICES:
        _bind_file(device, device, _SEALED | kernel.MOUNT_ATTR_NOEXEC)
    _bind_file(request["python"], request["python"], sealed_folder)
    _make_scratch(request)
    # Read-only last, because everything above creates mount targets in the root.
    kernel.set_attributes(_MOUNT_POINT, sealed_folder)
    kernel.change_root(_MOUNT_POINT)


def _make_scratch(request: "Request") -> None:
    """Create all writable folders, with the program and stdin. They share one size-limited tmpfs."""
    scratch = f"{_MOUNT_POINT}/scratch"
    os.mkdir(scratch)
    texts = {"program": request["program"].encode(), "stdin": request["stdin"].encode()}
    _mount_memory(scratch, size=request["scratch_bytes"] + sum(map(len, texts.values())))
    for name, text in texts.items():
        with open(f"{scratch}/{name}", "wb") as file:
            file.write(text)
        os.chmod(f"{scratch}/{name}", 0o666)
    for folder in (_SCRATCH, "/tmp", "/dev/shm"):
        source = scratch + "/" + os.path.basename(folder)
        os.mkdir(source)
        os.chmod(source, 0o777)
        os.makedirs(_MOUNT_POINT + folder, exist_ok=True)
        if folder == _SCRATCH:
            os.rename(f"{scratch}/program", source + "/" + os.path.basename(_PROGRAM))
        kernel.bind(source, _MOUNT_POINT + folder, kernel.MOUNT_ATTR_NOSUID)
    _bind_file(f"{scratch}/stdin", _STDIN, kernel.MOUNT_ATTR_NOSUID)
    # The bind mounts keep the tmpfs alive. This path would expose all of it.
    kernel.detach(scratch)


def _mount_memory(place: str, *, size: int) -> None:
    options = f"size={size},nr_inodes={_MAX_INODES},mode=755"
    kernel.mount("tmpfs", place, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, options=options)


def _bind_file(source: str, path: str, attributes: int) -> None:
    """Bind-mount a host file to `path` in the new root, unless a mounted folder already contains it."""
    target = _MOUNT_POINT + path
    if not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
        kernel.bind(source, target, attributes)


# --- program


def _program(request: "Request") -> None:
    """Drop all privileges and execute the program."""
    # A separate process group: signals to the group must not reach the launcher.
    os.setsid()
    os.chdir(_SCRATCH)
    os.dup2(os.open(_STDIN, os.O_RDONLY), 0)
    # Order matters: the bounding set and the user change need capabilities, and `drop_capabilities` sets no_new_privs,
    # which the seccomp filter requires. The filter comes last, since it blocks these calls.
    kernel.empty_bounding_set()
    if os.geteuid() != _INSIDE_ID:
        # Groups before the user, who may not change them.
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    kernel.drop_capabilities()
    _limit(request, max_processes=request["max_processes"])
    environment = {"HOME": _SCRATCH, "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8"}
    kernel.install_filter(request["filter"])
    _execute(request["python"], _PROGRAM, environment)


def _unguarded(request: "Request") -> None:
    """Execute the program with resource limits only, in a temporary folder and a separate process group."""
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)
    os.chdir(request["folder"])
    path = os.path.join(request["folder"], "program.py")
    for name, text in ((path, request["program"]), (os.path.join(request["folder"], "stdin"), request["stdin"])):
        with open(name, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.unlink("stdin")
    _limit(request, max_processes=None)
    environment = {"HOME": request["folder"], "TMPDIR": request["folder"], "LC_ALL": "C.UTF-8"}
    _execute(request["python"], path, environment)


def _limit(request: "Request", *, max_processes: int | None) -> None:
    # RLIMIT_CPU has whole seconds and must not fire before the wall-clock limit.
    cpu = int(request["seconds"]) + 2
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, request["memory_bytes"], request["memory_bytes"]),
        (resource.RLIMIT_STACK, _STACK_SIZE, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["scratch_bytes"], request["scratch_bytes"]),
        (resource.RLIMIT_NOFILE, request["max_files"], request["max_files"]),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, highest = resource.getrlimit(limit)
        lowered = hard if highest == resource.RLIM_INFINITY else min(hard, highest)
        resource.setrlimit(limit, (min(soft, lowered), lowered))
    if max_processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))


def _execute(python: str, path: str, environment: dict[str, str]) -> None:
    # PYTHONHASHSEED: a fixed set order, so that equal programs get equal rewards. MALLOC_ARENA_MAX: glibc would reserve
    # 64 MiB of the limited address space for each thread's arena.
    environment |= {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    os.execve(python, [python, "-P", "-s", "-B", "-X", "utf8", path], environment)
