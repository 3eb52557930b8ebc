"""The program that runs one untrusted program: makes the sandbox, waits for the end, leaves nothing behind.

Started by sandbox.run_program in a bare interpreter of its own, so that it may fork. Its processes:

    launcher   on the host, in new user, mount, network, IPC and UTS namespaces; kills at the time limit
    init       process 1 of a new process namespace, whose end makes the kernel kill everything in it
    program    limited, without capabilities, behind the seccomp filter; executes Python anew

Protocol: the request is standard input; the descriptors of a control pipe, whose end asks for the program's end, and
of a status pipe are arguments. On the latter come `{"error": ...}` if the sandbox could not be made, or from the
one that waits for the program `{"status": wait status, "seconds": ...}` or `{"ended": "time", "seconds": ...}`. All
are dicts written by marshal, since both sides are the same interpreter. Standard output and error are the program's.
"""

import marshal
import os
import resource
import select
import signal
import time

from rlhf_cli.rewards.sandbox import kernel

TYPE_CHECKING = False  # typing is not imported: every program that is run waits for what is
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypedDict

    class Request(TypedDict):
        """The program, its limits, and either the parts of its root (`sandboxed`) or its folder."""

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


SCRATCH = "/box"
PROGRAM = f"{SCRATCH}/program.py"
STDIN = "/dev/stdin"  # a file with the program's input, so that it can be opened by this name as well

# The new root is mounted here before it becomes the root: a folder every machine has, and nothing else is needed of.
_MOUNT_POINT = "/proc"

_INSIDE_ID = 1000  # user and group of the program inside
_MAX_INODES = 4096
_ROOT_SIZE = 1 << 20  # of empty folders and of files that others are shown in place of
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
    """Run the program of the request on standard input, given the descriptors of both pipes."""
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
        _kill_group(child)  # processes that it left running
        _report(status, status=ended, seconds=seconds)


def _wait(child: int, wake: int, control: int, *, deadline: float) -> int | str:
    """Return the wait status of a child that has ended, or why it has to: `time`, or `asked` by the control pipe."""
    waiting = select.poll()
    for descriptor in (wake, control):
        waiting.register(descriptor, select.POLLIN)
    while True:
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
    """Return a descriptor that can be read when a child has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _kill(child: int, *, is_group: bool) -> None:
    if is_group:
        _kill_group(child)
    os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is its own


def _kill_group(leader: int) -> None:
    try:  # noqa: SIM105 (contextlib takes longer to import than all that is done here)
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the latter for a group that is gone, on macOS
        pass


def _fork(run: "Callable[[], None]", status: int) -> int:
    """Return a child that does something and ends, never returning into this program."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):  # Python's handler would let process 1 be interrupted
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


# --- launcher: namespaces and who is who in them


def _enter_namespaces() -> None:
    """Move to new namespaces, in which the program's user is another than root of this machine."""
    _ask_kernel_to_take_this_first()
    other = _other_id() if os.geteuid() == 0 else None
    if other is None:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(_NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_INSIDE_ID} {user} 1")
        _write("/proc/self/gid_map", f"{_INSIDE_ID} {group} 1")
    else:
        _enter_as_root(other)
    kernel.set_host_name(b"sandbox")


def _enter_as_root(other: int) -> None:
    """Enter as root, whom the kernel does not hold to a number of processes: the program runs as another user."""
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
        raise PermissionError("the users of a new user namespace cannot be mapped (is CAP_SETUID missing?)")


def _other_id() -> int | None:
    """Return a user of this machine who is not root, `nobody` if it exists; None if there is nobody else."""
    with open("/proc/self/uid_map") as lines:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    last = max(first + count - 1 for first, count in ranges)
    return None if last == 0 else min(last, 65534)


def _ask_kernel_to_take_this_first() -> None:
    """If the machine runs out of memory, the kernel must kill this process first, not another one."""
    _write("/proc/self/oom_score_adj", "1000")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# --- init: process 1 of the sandbox


def _init(request: "Request", alive: tuple[int, int], status: int) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    os.close(alive[1])
    if select.select([alive[0]], [], [], 0)[0]:
        return  # the launcher ended before it was tied to
    kernel.hide_from_debuggers()
    _make_root(request)
    started = time.monotonic()
    program = _fork(lambda: _program(request), status)
    kernel.empty_bounding_set()
    kernel.drop_capabilities()
    while True:  # process 1 is parent to whom others leave behind
        pid, ended = os.wait()
        if pid == program:
            break
    _report(status, status=ended, seconds=time.monotonic() - started)


def _make_root(request: "Request") -> None:
    """Make a root in memory with the interpreter, its libraries, scratch folders and the program's input files."""
    sealed_folder = _SEALED | kernel.MOUNT_ATTR_NODEV
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
    kernel.set_attributes(_MOUNT_POINT, sealed_folder)
    kernel.change_root(_MOUNT_POINT)


def _make_scratch(request: "Request") -> None:
    """Make all writable folders, which share one bounded piece of memory, with the program and its input files."""
    scratch = f"{_MOUNT_POINT}/scratch"
    os.mkdir(scratch)
    texts = {"program": request["program"].encode(), "stdin": request["stdin"].encode()}
    _mount_memory(scratch, size=request["scratch_bytes"] + sum(map(len, texts.values())))
    for name, text in texts.items():
        with open(f"{scratch}/{name}", "wb") as file:
            file.write(text)
        os.chmod(f"{scratch}/{name}", 0o666)
    for folder in (SCRATCH, "/tmp", "/dev/shm"):
        source = scratch + "/" + os.path.basename(folder)
        os.mkdir(source)
        os.chmod(source, 0o777)
        os.makedirs(_MOUNT_POINT + folder, exist_ok=True)
        if folder == SCRATCH:
            os.rename(f"{scratch}/program", source + "/" + os.path.basename(PROGRAM))
        kernel.bind(source, _MOUNT_POINT + folder, kernel.MOUNT_ATTR_NOSUID)
    _bind_file(f"{scratch}/stdin", STDIN, kernel.MOUNT_ATTR_NOSUID)
    kernel.detach(scratch)


def _mount_memory(place: str, *, size: int) -> None:
    options = f"size={size},nr_inodes={_MAX_INODES},mode=755"
    kernel.mount("tmpfs", place, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, options=options)


def _bind_file(source: str, path: str, attributes: int) -> None:
    """Show a file of this machine as `path` of the new root, unless it lies in a folder that is shown."""
    target = _MOUNT_POINT + path
    if not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
        kernel.bind(source, target, attributes)


# --- program


def _program(request: "Request") -> None:
    """Become the program, with nothing it could use against anybody."""
    os.setsid()  # a process group of its own: signals to its group must not reach the host's
    os.chdir(SCRATCH)
    os.dup2(os.open(STDIN, os.O_RDONLY), 0)
    kernel.empty_bounding_set()
    if os.geteuid() != _INSIDE_ID:
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    kernel.drop_capabilities()
    _limit(request, max_processes=request["max_processes"])
    environment = {"HOME": SCRATCH, "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8"}
    kernel.install_filter(request["filter"])
    _execute(request["python"], PROGRAM, environment)


def _unguarded(request: "Request") -> None:
    """Become the program with limits alone, in a folder and a process group of its own."""
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
    cpu = int(request["seconds"]) + 2  # whole seconds, never before the limit on the clock
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
    # Equal programs give equal rewards: the order of sets does not change. One arena of memory, because each further
    # one reserves 64 MiB of the limited address space for every thread.
    environment |= {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    os.execve(python, [python, "-P", "-s", "-B", "-X", "utf8", path], environment)
