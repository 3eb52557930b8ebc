"""The sandbox of code rewards: exit of programs, and programs that try to escape.

The tests check effects on this machine instead of the program's own output. Attacks run twice: with all guards, and
without the seccomp filter, so that namespaces and limits are tested separately.
"""

import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.sandbox import run as sandbox
from rlhf_cli.rewards.sandbox.run import Launch, Limits, ProgramOutcome, run_program, sandboxed_request

PROJECT = Path(__file__).parents[3]
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
Run = Callable[..., ProgramOutcome]


@pytest.fixture(autouse=True, scope="module")
def _possible_here() -> None:
    try:
        sandbox.require_sandbox()
    except UsageError as error:
        pytest.skip(f"THE SANDBOX IS NOT TESTED: {error}")


@pytest.fixture(params=["all guards", "no filter"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a program that should reach its last line, which prints `ran`, unless it is killed."""

    def run(program: str, stdin: str = "", limits: Limits | None = None) -> ProgramOutcome:
        limits = limits or Limits(seconds=60.0)
        asked = sandboxed_request(program, stdin, limits)
        if request.param == "no filter":
            asked["filter"] = ALLOW_ALL
        return Launch(asked, limits).outcome()

    return run


def programs_on_this_machine() -> list[int]:
    """Return the processes on the machine that run a sandboxed program.

    Programs of other test processes do not count, but programs without an owner do.
    """
    found = []
    own = psutil.Process()
    others = {sibling.pid for sibling in psutil.Process(own.ppid()).children()} - {own.pid}
    for process in psutil.process_iter():
        try:
            if "/box/program.py" in process.cmdline() and not others & {parent.pid for parent in process.parents()}:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check after each test that no process, mount, temporary file or file descriptor is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    mounts, descriptors = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
    yield
    assert programs_on_this_machine() == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert list(temporary.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- how programs end


@pytest.mark.parametrize(
    ("program", "ended", "exit_code", "number"),
    [
        ("print(int(input()) * 2)", "finished", 0, None),
        ("1 / 0", "raised", 1, None),
        ("import sys; sys.exit(3)", "raised", 3, None),
        ("exit(0)", "finished", 0, None),  # from `site`, which such programs often use
        ("syntax error", "raised", 1, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", None, signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", "killed", None, signal.SIGSEGV),
        ("block = bytearray(10**10)", "memory", 1, None),
        ("while True: pass", "time", None, None),
        ("import time; time.sleep(60)", "time", None, None),
        ("while True: print('x' * 100)", "output", None, None),
        ("import sys\nwhile True: print('x' * 100, file=sys.stderr)", "output", None, None),
    ],
)
def test_the_end_of_a_program_is_told(program, ended, exit_code, number):
    outcome = run_program(program, "21\n", limits=Limits(seconds=1.0 if ended == "time" else 60.0))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == (ended, exit_code, number)


def test_input_and_output_pass_unchanged_and_errors_go_apart():
    text = "ä\r\n\x00 \ud83d" * 50_000
    outcome = run_program(
        "import sys\nsys.stdout.write(sys.stdin.buffer.read().decode())\nprint('e', file=sys.stderr)", text
    )
    assert outcome.stdout == text.encode("utf-8", "replace").decode()
    assert outcome.stderr == "e\n"


def test_output_is_cut_where_its_limit_is():
    outcome = run_program("print('x' * 10_000)", limits=Limits(output_bytes=5))
    assert (outcome.ended, outcome.stdout) == ("output", "x" * 5)


def test_standard_input_can_be_opened_by_name_and_number():
    assert run_program("print(open('/dev/stdin').read(), open(0).read())", "one").stdout == "one one\n"


def test_the_standard_library_and_threads_work():
    program = """
import asyncio, bisect, collections, ctypes, decimal, fractions, hashlib, heapq, itertools, json, math, random, re
import sqlite3, ssl, statistics, sys, threading, zlib
from concurrent.futures import ThreadPoolExecutor
sys.setrecursionlimit(10**6)
threading.stack_size(64 << 20)
def depth(n):
    return n and 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(50_000)))
thread.start(); thread.join()
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(abs, range(-3, 3))))
async def answer():
    await asyncio.sleep(0.01)
    return 42
print(asyncio.run(answer()))
open('file', 'w').write('kept'); print(open('file').read())
"""
    outcome = run_program(program, limits=Limits(seconds=60.0))
    assert outcome.stdout.split() == ["50000", "9", "42", "kept"], outcome.stderr


def test_equal_programs_have_equal_output():
    program = "print(list({str(i) for i in range(50)}), hash('a'))"
    assert run_program(program).stdout == run_program(program).stdout


# --- ways out


def test_the_network_cannot_be_reached(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        outcome = run(f"""
import ctypes, socket, struct
libc = ctypes.CDLL(None)
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1),
    lambda: socket.create_connection(("localhost", {port}), timeout=1),
    lambda: socket.getaddrinfo("example.com", 80),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})),
    lambda: libc.connect(libc.socket(2, 1, 0), struct.pack("=HHI8x", 2, socket.htons({port}), 0x100007F), 16),
):
    try:
        print("reached" if attempt() != -1 else "")
    except OSError:
        pass
print("ran")
""")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.stdout.split() == ["ran"], outcome.stderr


def test_abstract_sockets_of_this_machine_cannot_be_reached(run):
    name = f"\0rlhf-sandbox-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.setblocking(False)
        outcome = run(f"""
import socket
try:
    socket.socket(socket.AF_UNIX).connect({name!r})
except OSError:
    print("ran")
""")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.stdout.split() == ["ran"], outcome.stderr


def test_files_of_this_machine_cannot_be_read(run, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret of this machine")
    os.chmod(secret, 0o666)
    wanted = [str(secret), "/etc/passwd", "/etc/hostname", str(PROJECT / "pyproject.toml"), str(Path.home()), __file__]
    wanted += [
        "/proc/1/environ",
        f"/proc/{os.getpid()}/environ",
        "/proc/self/mem",
        "/sys/kernel",
        "/dev/mem",
        "/dev/vda",
    ]
    wanted += [str(tmp_path), str(Path.home() / ".bashrc"), "/home", "/var", "/run", sys.prefix + "/pyvenv.cfg"]
    outcome = run(f"""
import os
os.symlink({str(secret)!r}, "link")
os.symlink("/", "all")
for path in {wanted!r}:
    for way in (path, "/box/all" + path, "/../.." + path, "/proc/1/root" + path, "/proc/self/cwd/../.." + path):
        if os.path.isfile(way):
            print(path, open(way).read())
        elif os.path.isdir(way) and os.listdir(way) and not {os.path.dirname(sys.base_prefix)!r}.startswith(path):
            print(path, os.listdir(way))
for folder, _, files in os.walk("/"):
    print("found" * ("secret.txt" in files), end="")
for descriptor in range(3, 256):
    try:
        os.fstat(descriptor)
        print("open", descriptor)
    except OSError:
        pass
print("ran")
""")
    assert outcome.stdout.split() == ["ran"], outcome.stderr


def test_nothing_can_be_written_on_this_machine(run, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("as it was")
    os.chmod(precious, 0o666)
    os.chmod(tmp_path, 0o777)
    outcome = run(f"""
import os
os.symlink({str(precious)!r}, "link")
marks = []
def attempt(path):
    try:
        with open(path, "w") as file:
            file.write("broken in")
        marks.append(path)
    except OSError:
        pass
attempt("link")
attempt({str(precious)!r})
attempt({str(tmp_path / "mark")!r})
for folder, _, files in os.walk("/"):
    attempt(folder + "/rlhf-sandbox-mark")
    for name in files[:2] if folder.startswith(({sys.base_prefix!r}, "/usr", "/lib")) else []:
        attempt(folder + "/" + name)
for change in (os.remove, lambda path: os.chmod(path, 0o777)):
    try:
        change(os.__file__)
        marks.append(os.__file__)
    except OSError:
        pass
print(*marks, sep="\\n")
""")
    assert "/box/rlhf-sandbox-mark" in outcome.stdout.split(), outcome.stderr
    assert {path.rpartition("/")[0] for path in outcome.stdout.split()} == {"/box", "/tmp", "/dev/shm"}
    assert not any(os.path.exists(path) for path in outcome.stdout.split())
    assert precious.read_text() == "as it was"


def test_nothing_of_the_environment_is_seen(monkeypatch, run):
    monkeypatch.setenv("RLHF_TEST_TOKEN", "hidden-token")
    outcome = run("""
import ctypes, os
print(dict(os.environ))
for path in ("/proc/self/environ", "/proc/1/environ", "/proc/2/environ"):
    if os.path.exists(path):
        print(open(path).read())
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
index = 0
while environ[index]:
    print(environ[index]); index += 1
print("ran")
""")
    assert "hidden-token" not in outcome.stdout
    assert outcome.stdout.split()[-1] == "ran", outcome.stderr


def test_other_processes_get_no_signals(run):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # in our process group
    try:
        outcome = run(f"""
import os
print("ran", flush=True)
for number in (9, 15, 2):
    for target in ({bystander.pid}, {os.getpid()}, {os.getppid()}, 1, -{os.getpgrp()}):
        try:
            os.kill(target, number)
        except OSError:
            pass
for group in {{os.getpgid(1), os.getpgrp()}} - {{0}}:
    os.killpg(group, 18)
try:
    os.kill(-1, 9)
except ProcessLookupError:
    pass  # there is nobody else
os.kill(0, 9)
""")
        assert outcome.stdout.split() == ["ran"]
        assert outcome.ended == "killed"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


class Watch:
    """Records the largest number of sandbox processes and threads on this machine."""

    def __enter__(self) -> "Watch":
        self.most, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.05):
            tasks = 0
            for process in programs_on_this_machine():
                try:
                    tasks += len(os.listdir(f"/proc/{process}/task"))
                except OSError:
                    continue
            self.most = max(self.most, tasks)


def test_a_fork_bomb_stays_small(run):
    limits = Limits(seconds=3.0, max_processes=20)
    with Watch() as watch:
        outcome = run(
            """
import os
print("ran", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
            limits=limits,
        )
    assert outcome.stdout.startswith("ran")
    assert outcome.ended == "time"
    assert 1 <= watch.most <= 20


def test_a_bomb_of_threads_stays_small(run):
    with Watch() as watch:
        outcome = run(
            """
import threading, time
threading.stack_size(32 << 10)
print("ran", flush=True)
while True:
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        time.sleep(0.01)
""",
            limits=Limits(seconds=3.0, max_processes=20),
        )
    assert outcome.stdout.startswith("ran")
    assert outcome.ended == "time"
    assert 2 <= watch.most <= 20


def test_grandchildren_that_hide_end_with_the_program(run):
    hiding = """
import os, time
def hide():
    try:
        if os.fork():
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        for descriptor in range(3):
            os.close(descriptor)
        time.sleep(60)
    except OSError:
        pass
hide(); hide()
time.sleep(0.3)
print("ran", flush=True)
"""
    for end in ("", "while True: pass"):
        outcome = run(hiding + end, limits=Limits(seconds=3.0 if end else 60.0))
        assert outcome.ended == ("time" if end else "finished"), outcome.stderr
        assert outcome.stdout.startswith("ran")
        assert programs_on_this_machine() == []


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_processes_of_the_sandbox_end_with_their_owner(kill):
    """A worker is killed with its process group, but killing only the worker must be enough."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from rlhf_cli.rewards.sandbox.run import *\nrun_program('while 1: 1', limits=Limits(120.0))",
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(programs_on_this_machine()) == 1)
    finally:
        kill(owner.pid, signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not programs_on_this_machine())


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it did not become so within half a minute")


@pytest.mark.parametrize("way", ["bytearray(size)", "mmap.mmap(-1, size)", "ctypes.create_string_buffer(size)"])
def test_memory_is_bounded(run, way):
    outcome = run(
        f"""
import ctypes, mmap
size, kept = 1 << 20, []
try:
    while True:
        kept.append({way})
except (MemoryError, OSError):
    count = len(kept)
    kept.clear()
    print(count)
""",
        limits=Limits(seconds=60.0, memory_bytes=100 << 20),
    )
    assert 5 < int(outcome.stdout) < 100, outcome.stderr


def test_files_are_bounded(run):
    outcome = run(
        """
import os
written = 0
for folder in ("/box", "/tmp", "/dev/shm", "/", "/dev"):
    for number in range(10_000):
        try:
            with open(f"{folder}/file{number}", "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError:
            if number and not os.path.exists(f"{folder}/file{number}"):
                break
print(written)
""",
        limits=Limits(scratch_bytes=4 << 20, seconds=60.0),
    )
    assert 1 << 20 < int(outcome.stdout) <= 5 << 20, outcome.stderr


def test_there_are_few_files_even_empty_ones(run):
    outcome = run("""
number = 0
try:
    while True:
        open(f"/box/{number}", "w").close()
        number += 1
except OSError:
    print(number)
""")
    assert 100 < int(outcome.stdout) < 5_000, outcome.stderr


# System call numbers on x86_64 and aarch64 that expose the kernel to attacks.
DANGEROUS = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "socket": (41, 198), "connect": (42, 203), "keyctl": (250, 219), "add_key": (248, 217), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "memfd_create": (319, 279), "shmget": (29, 194),
    "setuid": (105, 146), "capset": (126, 91), "personality": (135, 92), "open_by_handle_at": (304, 265),
    "clone3": (435, 435), "execveat": (322, 281), "pidfd_open": (434, 434), "reboot": (169, 142), "swapon": (167, 224),
    "settimeofday": (170, 170), "sethostname": (170, 161), "syslog": (103, 116), "seccomp": (317, 277),
    "fsopen": (430, 430), "move_mount": (429, 429), "mount_setattr": (442, 442), "quotactl": (179, 60),
    "name_to_handle_at": (303, 264), "sendmsg": (46, 211), "landlock_create_ruleset": (444, 444), "prctl": (157, 167),
}  # fmt: skip


def test_calls_that_open_the_kernel_do_not_exist():
    column = ["x86_64", "aarch64"].index(platform.machine())
    numbers = {name: both[column] for name, both in DANGEROUS.items()}
    outcome = run_program(f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers!r}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
        print(name)
print("ran")
""")
    assert outcome.stdout.split() == ["ran"], outcome.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "clone, 17",  # SIGCHLD: a process
        "clone, 0x10000000 | 17",  # in a new user namespace
        "clone, 0x10010000 | 0x900",  # a thread in a new user namespace
        "prlimit, 1, 0, 0, 0",
        "ioctl, 0, 0x5412, 0",  # TIOCSTI
        "socketpair, 2, 1, 0, 0",
    ],
)
def test_calls_are_looked_at_closely(arguments):
    column = ["x86_64", "aarch64"].index(platform.machine())
    numbers = {"clone": (56, 220), "prlimit": (302, 261), "ioctl": (16, 29), "socketpair": (53, 199)}
    names = "".join(f"{name} = {both[column]}\n" for name, both in numbers.items())
    outcome = run_program(f"{names}import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
                          f"print(libc.syscall({arguments}), ctypes.get_errno())")  # fmt: skip
    assert outcome.stdout.split() == ["-1", "1"], outcome.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="i386 and x32 are ways into an x86_64 kernel")
@pytest.mark.parametrize(
    "attempt",
    [
        "libc.syscall(0x40000000 | 39)",  # getpid of x32
        # mov eax, 20; int 0x80; ret: getpid of i386
        "memory = mmap.mmap(-1, 4096, prot=7); memory.write(bytes.fromhex('b814000000cd80c3'));"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()",
    ],
)
def test_calls_by_the_rules_of_another_architecture_end_the_program(attempt):
    outcome = run_program(
        f"import ctypes, mmap\nlibc = ctypes.CDLL(None)\nprint('ran', flush=True)\n{attempt}\nprint('out')"
    )
    assert (outcome.stdout.split(), outcome.signal) == (["ran"], signal.SIGSYS)


def test_the_program_has_no_capabilities_and_cannot_get_any(run):
    outcome = run("""
import ctypes, os
libc = ctypes.CDLL(None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
print(*data, *os.getresuid(), *os.getresgid(), os.getgroups() if len(os.getgroups()) > 1 else "")
for number in (0, 65534):
    try:
        os.setuid(number)
        print("changed")
    except OSError:
        pass
""")
    assert outcome.stdout.split() == ["0"] * 6 + ["1000"] * 6, outcome.stderr


# --- machines and runs without a sandbox


def test_without_namespaces_it_is_refused_in_one_sentence():
    """Run a child that may not call unshare, as in a container."""
    number = {"x86_64": 272, "aarch64": 97}[platform.machine()]
    program = f"""
import struct
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.sandbox import run as sandbox
from rlhf_cli.rewards.sandbox import kernel
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
kernel.drop_capabilities()
kernel.install_filter(b"".join(struct.pack("=HBBI", *line) for line in code))
try:
    sandbox.require_sandbox()
except UsageError as error:
    print(error)
sandbox.require_sandbox(sandboxed=False)
"""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(
        "code cannot run on this machine: the sandbox could not be created (unshare: Operation not permitt"
    )
    assert "--code_unsandboxed" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("print(input())", "finished"),
        ("1 / 0", "raised"),
        ("block = bytearray(10**10)", "memory"),
        ("while True: pass", "time"),
        ("while True: print('x' * 100)", "output"),
    ],
)
def test_without_the_sandbox_limits_hold(program, ended):
    limits = Limits(seconds=1.0 if ended == "time" else 60.0)
    outcome = run_program(program, "text\n", limits=limits, sandboxed=False)
    assert outcome.ended == ended
    assert outcome.stdout.startswith("text") == (ended == "finished")


def test_without_the_sandbox_the_process_group_is_killed():
    program = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint(os.getpgrp())"
    outcome = run_program(program, sandboxed=False)
    wait_until(lambda: not group_exists(int(outcome.stdout)))


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True
