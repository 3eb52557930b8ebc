"""Output on a terminal, to a pipe and in the log file, with real file descriptors and child processes."""

import io
import os
import pty
import struct
import subprocess
import sys
import textwrap
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest
from rich.console import Console
from rich.text import Text

from rlhf_cli.tracking.figures import Reading, duration, number
from rlhf_cli.tracking.terminal.live_region import LiveRegion
from rlhf_cli.tracking.terminal.live_view import History, LiveView
from rlhf_cli.tracking.terminal.progress import Pace, plain_line

METRICS = {
    "policy_loss": -0.0213,
    "reward": 0.75,
    "accuracy": 0.7812,
    "kl": 0.0123,
    "entropy": 1.25,
    "response_length": 118.5,
    "grad_norm": 0.9,
    "lr": 1e-6,
    "critic/value_loss": 0.2,
    "critic/explained_variance": 0.4,
    "a_metric_with_a_very_long_name_that_fits_nowhere": 1.0,
    "num_tokens": 5000.0,
    "time/generate": 6.0,
    "time/train": 3.0,
    "time/step": 10.0,
    "perf/tokens_per_second": 12_345.0,
    "memory/host_gib": 3.14,
}

NOISY_RUN = textwrap.dedent(
    """
    import ctypes, os, subprocess, sys, warnings, logging
    from pathlib import Path
    from rlhf_cli.tracking.terminal.console import quiet_process

    log = Path(sys.argv[1])
    with quiet_process(log) as terminal:
        print("noise of print")
        sys.stderr.write("noise of stderr\\n")
        warnings.warn("noise of warnings")
        logging.warning("noise of logging")
        ctypes.CDLL(None).puts(b"noise of C")
        subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
        pid = os.fork()
        if pid == 0:
            print("noise of a fork")
            terminal.console.print("console of a fork")
            terminal.restore()
            print("fork after restore", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        terminal.console.print("for the person")
        terminal.error_console.print("error for the person")
        if len(sys.argv) > 2:
            raise RuntimeError("it broke")
    print("after the run")
    """
)


def run_noisy(log: Path, *extra: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", NOISY_RUN, str(log), *extra]
    # Unbuffered Python also unbuffers C streams, which would hide lines that are printed too late.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_only_our_own_output_reaches_the_terminal(tmp_path):
    log = tmp_path / "logs" / "run.log"
    done = run_noisy(log)
    assert done.returncode == 0
    assert done.stdout == "for the person\nafter the run\n"
    assert done.stderr == "error for the person\n"
    text = log.read_text()
    for source in ("print", "stderr", "warnings", "logging", "C", "a child", "a fork"):
        assert f"noise of {source}" in text
    assert "console of a fork" in text
    assert "fork after restore" in text


def test_unexpected_error_leaves_its_trace_in_the_log_and_the_path_on_the_terminal(tmp_path):
    log = tmp_path / "run.log"
    done = run_noisy(log, "fail")
    assert f"The log of this process is {log}" in done.stderr
    assert "RuntimeError: it broke" in log.read_text()
    assert "Traceback" in log.read_text()


def test_log_of_an_earlier_start_is_kept(tmp_path):
    log = tmp_path / "run.log"
    run_noisy(log)
    run_noisy(log)
    assert log.read_text().count("noise of print") == 2


TRACKED_RUN = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from rlhf_cli.config.train import TrackingConfig
    from rlhf_cli.tracking.terminal.console import quiet_process
    from rlhf_cli.tracking.tracker import Tracker

    output = Path(sys.argv[1])
    with quiet_process(output / "logs" / "run.log") as terminal:
        tracker = Tracker(TrackingConfig(use_tensorboard=False), output, command="sft", total_steps=4,
                          console=terminal.console, resume_step=None)
        with tracker:
            tracker.start({"Model": "tiny"})
            for step in range(1, 5):
                tracker.log(step, {"loss": 1 / step, "num_tokens": 10.0}, {"train": 0.1})
                time.sleep(float(sys.argv[2]))
            tracker.close(facts={"Report": "report.html"})
    """
)


def test_in_a_pipe_each_step_is_one_plain_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRACKED_RUN, str(tmp_path), "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color"},
    )
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 4
    assert lines[0] == "rlhf sft"
    assert any(line.startswith("step 2/4  loss 0.5000  ") for line in lines)
    assert "Finished: 4/4 steps" in done.stdout
    assert any(line.split() == ["loss", "1", "→", "0.2500"] for line in lines)
    assert any(line.split() == ["Report", "report.html"] for line in lines)


def test_reader_that_is_gone_does_not_stop_the_run(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", TRACKED_RUN, str(tmp_path), "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 4


def run_in_terminal(output: Path, *, term: str, columns: int = 80) -> str:
    """Return the run's output on a real pseudo-terminal."""
    parent, child = pty.openpty()
    ioctl(child, TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    command = [sys.executable, "-c", TRACKED_RUN, str(output), "0.1"]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=child, stderr=child, env=environment | {"TERM": term}
    ) as process:
        os.close(child)
        chunks = []
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # on Linux, no process has the other end open
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(parent)
    assert process.returncode == 0
    return b"".join(chunks).decode()


def test_terminal_gets_a_live_view_of_its_own_width(tmp_path):
    shown = run_in_terminal(tmp_path, term="xterm-256color", columns=100)
    assert "\x1b[1A" in shown  # redrawn in place
    assert "\x1b[?25l" not in shown  # the cursor is never hidden, because a kill would lose it
    final = shown.rsplit("step 4/4", 1)[1]
    assert "100%" in final
    assert "loss" in final
    assert "0.2500" in final
    drawn = Text.from_ansi(" step 4/4" + final.splitlines()[0])
    assert drawn.cell_len == 99


def test_dumb_terminal_gets_plain_lines(tmp_path):
    shown = run_in_terminal(tmp_path, term="dumb")
    assert "\x1b" not in shown
    assert "step 3/4  loss 0.3333" in shown


def live_view(*, phase: str | None = None) -> LiveView:
    now = [100.0]
    pace = Pace(40, start_step=0, clock=lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40)
    view = LiveView(console, pace, unit="iteration", history={}, clock=lambda: now[0])
    now[0] += 10.0
    pace.reach(10)
    view.step(Reading(10, METRICS))
    view.phase(phase)
    now[0] += 4.0
    return view


@pytest.mark.parametrize("width", [40, 79, 139])
def test_live_view_fits_the_width(width):
    view = live_view(phase="generate")
    view.close()
    lines = view.lines(width)
    assert max(line.cell_len for line in lines) <= width


def test_live_view_shows_the_logged_numbers_the_phases_and_the_time_left():
    view = live_view(phase="generate")
    text = "\n".join(line.plain for line in view.lines(79))
    view.close()
    assert "iteration 10/40" in text
    assert "25%" in text
    assert "26s left" in text  # 30 steps of 1 s, 4 s elapsed
    assert "now generate 4.0s" in text
    assert "0.7812" in text
    assert "12.3k tokens/s" in text
    assert "host 3.1 GiB" in text
    assert "generate 6.0s 60%" in text
    assert "train 3.0s 30%" in text
    assert "other 1.0s 10%" in text


def test_broken_number_is_red_in_the_live_view():
    view = live_view()
    view.step(Reading(11, {"loss": float("nan")}))
    line = next(line for line in view.lines(79) if "nan" in line.plain)
    view.close()
    assert any("red" in str(span.style) for span in line.spans)


class Screen:
    """A terminal whose width can shrink, which wraps long rows."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[str] = [""]

    def feed(self, text: str) -> None:
        while text:
            if text.startswith("\x1b[1A"):
                self.rows.pop()  # lines below the cursor are redrawn anyway
                text = text[4:]
            elif text.startswith("\x1b[2K"):
                self.rows[-1] = ""
                text = text[4:]
            elif text[0] == "\n":
                self.rows.append("")
                text = text[1:]
            else:
                self.rows[-1] += text[0]
                text = text[1:]

    def narrow(self, width: int) -> None:
        wrapped = []
        for row in self.rows:
            wrapped += [row[i : i + width] for i in range(0, max(1, len(row)), width)]
        self.rows, self.width = wrapped, width


def test_narrower_terminal_keeps_no_remains_of_the_wider_view():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=60, height=30)
    region = LiveRegion(console, lambda width: [Text("=" * width), Text("-" * width), Text("short")])
    screen = Screen(60)

    def show() -> None:
        screen.feed(file.getvalue())
        file.seek(0)
        file.truncate()

    region.start()
    region.refresh()
    region.print(Text("a message"))
    show()
    assert screen.rows == ["a message", "=" * 59, "-" * 59, "short", ""]
    screen.narrow(25)
    console.width = 25
    region.refresh()
    show()
    region.stop()
    assert screen.rows == ["a message", "=" * 24, "-" * 24, "short", ""]


def test_course_of_a_long_run_keeps_its_shape_in_bounded_space():
    course = History()
    for step in range(10_000):
        course.add(float(step))
    assert len(course._points) <= 256
    assert course.sparkline(8) == "▁▂▃▄▅▆▇█"


def test_sparkline_of_a_constant_is_flat_and_marks_broken_values():
    course = History()
    for value in (2.0, 2.0, float("nan"), 2.0):
        course.add(value)
    assert course.sparkline(10) == "▁▁!▁"


def test_time_left_follows_the_last_steps_and_counts_down():
    now = [0.0]
    pace = Pace(100, start_step=10, clock=lambda: now[0])
    assert pace.remaining is None
    now[0] = 1000.0  # a slow first step
    pace.reach(11)
    for step in range(12, 41):
        now[0] += 2.0
        pace.reach(step)
    assert pace.remaining == pytest.approx(60 * 2.0)
    now[0] += 1.0
    assert pace.remaining == pytest.approx(60 * 2.0 - 1.0)


def test_plain_line_names_metrics_as_they_are_logged():
    pace = Pace(40, start_step=0, clock=lambda: 0.0)
    line = plain_line(Reading(7, METRICS), pace, unit="iteration")
    assert line.startswith("iteration  7/40  accuracy 0.7812  reward 0.7500  policy_loss -0.0213")
    assert "10s (generate 60% train 30% other 10%)" in line
    assert "\n" not in line


def test_plain_line_shows_skipped_steps_only_if_there_are_any():
    pace = Pace(40, start_step=0, clock=lambda: 0.0)
    loss = {"loss": 0.5, "skipped_steps": 0.0, "skipped_in_a_row": 0.0}
    assert plain_line(Reading(7, loss), pace, unit="step") == "step  7/40  loss 0.5000"
    shown = plain_line(Reading(7, loss | {"skipped_steps": 2.0}), pace, unit="step")
    assert shown == "step  7/40  loss 0.5000  skipped_steps 2"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (0.78125, "0.7812"),
        (1234.5, "1234"),
        (12.345, "12.35"),
        (-0.5, "-0.5000"),
        (3.2e-7, "3.20e-07"),
        (12_345.0, "12.3k"),
        (1.5e9, "1.50G"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_are_short_and_keep_four_digits(value, written):
    assert number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0004, "0.4ms"),
        (0.021, "21ms"),
        (0.214, "0.21s"),
        (0.999, "1.0s"),
        (9.97, "10s"),
        (59.6, "1:00"),
        (187, "3:07"),
        (3760, "1:02:40"),
    ],
)
def test_durations_are_short(seconds, written):
    assert duration(seconds) == written
