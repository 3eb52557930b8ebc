"""`--on_event`: what the command reads, when it runs, and that it never stops or delays a run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import cli
from rlhf_cli.backends.training.distributed_env import REPORTED_BY_PARENT
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.errors import RunError
from rlhf_cli.options import build_config
from rlhf_cli.runs.events import alarm_event, run_event, with_events


def settings(folder: Path, **values: Any) -> SFTConfig:
    """Return settings with a command that appends each event and its variables to events.jsonl."""
    events, variables = folder / "events.jsonl", folder / "variables"
    command = f"(cat; echo) >> {events}; echo $RLHF_EVENT $RLHF_OUTPUT_DIR $RLHF_COMMAND >> {variables}"
    given = {"pretrain": "tiny", "dataset": "d.jsonl", "output": str(folder / "run"), "on_event": command}
    config: SFTConfig = build_config(SFTConfig, {**given, **values}, spelled="{}")
    return config


def events(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def kinds(folder: Path) -> list[tuple[str, str]]:
    return [(event["event"], event["message"]) for event in events(folder)]


def test_start_and_end_of_a_run(tmp_path):
    with with_events(settings(tmp_path)) as begin:
        begin()
        assert kinds(tmp_path) == [("start", "")]
    assert kinds(tmp_path) == [("start", ""), ("end", "finished")]
    event = events(tmp_path)[0]
    assert event.pop("time") == pytest.approx(time.time(), abs=60)
    assert event == {
        "event": "start",
        "message": "",
        "command": "sft",
        "model": "tiny",
        "output": str(tmp_path / "run"),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "run": None,
    }
    assert (tmp_path / "variables").read_text() == f"start {tmp_path}/run sft\nend {tmp_path}/run sft\n"


def test_an_alarm_is_an_event_that_the_run_does_not_wait_for(tmp_path):
    began = time.monotonic()
    config = settings(tmp_path, on_event=f"sleep 1; cat >> {tmp_path}/events.jsonl; echo >> {tmp_path}/events.jsonl")
    alarm_event(config)("loss-spike in step 9: loss is 4")
    assert time.monotonic() - began < 0.5
    while not events(tmp_path):
        time.sleep(0.05)
    assert kinds(tmp_path) == [("alarm", "loss-spike in step 9: loss is 4")]
    alarm_event(settings(tmp_path, on_event=None))("loss-spike in step 9: loss is 4")


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (RunError("rank 1 died,\n see logs"), ("failure", "rank 1 died, see logs")),
        (ZeroDivisionError(), ("failure", "ZeroDivisionError")),
        (SystemExit(1), ("failure", "exit status 1")),
        (SystemExit(130), ("end", "interrupted")),
        (SystemExit(0), ("end", "finished")),
        (KeyboardInterrupt(), ("end", "interrupted")),
    ],
)
def test_each_way_to_end_is_reported_and_passed_on(tmp_path, error: BaseException, event: tuple[str, str]):
    with pytest.raises(type(error)) as raised, with_events(settings(tmp_path)):
        raise error
    assert raised.value is error
    assert kinds(tmp_path) == [event]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_would_end_the_process_during_the_start_is_reported(tmp_path, signum: signal.Signals):
    before = signal.signal(signum, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(128 + signum)), with_events(settings(tmp_path)):
            signal.raise_signal(signum)
        assert kinds(tmp_path) == [("end", "interrupted")]
        assert signal.getsignal(signum) is signal.SIG_DFL
    finally:
        signal.signal(signum, before)


def test_the_event_holds_the_record_of_this_run_but_not_of_an_earlier_one(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    facts = {"command": "sft", "unit": "step", "total_steps": 9, "outcome": "failed"}
    (root / "run.json").write_text(json.dumps(facts))
    (root / "config.yaml").write_text("pretrain: tiny\n")
    os.utime(root / "run.json", (1e9, 1e9))
    with with_events(settings(tmp_path)):
        pass
    with with_events(settings(tmp_path)):
        (root / "run.json").write_text(json.dumps(facts))
        (root / "metrics.jsonl").write_text('{"step": 4, "loss": NaN, "time/step": 1.0}\n'.replace("NaN", '"NaN"'))
    earlier, own = (event["run"] for event in events(tmp_path))
    assert earlier is None
    assert (own["state"], own["step"], own["total_steps"], own["metrics"]) == ("failed", 4, 9, {"loss": "NaN"})


def test_secrets_of_the_environment_are_not_in_events(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-7f3a")
    with pytest.raises(RunError, match="401"), with_events(settings(tmp_path)):
        raise RunError("401 for Bearer planted-7f3a at reward server")
    assert "planted" not in (tmp_path / "events.jsonl").read_text()
    assert kinds(tmp_path)[0] == ("failure", "401 for Bearer (hidden) at reward server")


@pytest.mark.parametrize(("name", "value"), [(REPORTED_BY_PARENT, "1"), ("RANK", "3")])
def test_one_process_of_a_run_reports(tmp_path, monkeypatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    with with_events(settings(tmp_path)) as begin:
        begin()
    assert kinds(tmp_path) == []


def test_a_command_that_fails_is_a_line_and_the_run_goes_on(tmp_path, capsys):
    with with_events(settings(tmp_path, on_event="echo first; echo no such channel >&2; exit 3")) as begin:
        begin()
    line = "rlhf sft: --on_event at the {}: exit status 3: no such channel\n"
    assert capsys.readouterr().err == line.format("start") + line.format("end")


def test_the_command_and_its_children_are_killed_at_the_time_limit(tmp_path):
    pid_file, begin = tmp_path / "pid", time.monotonic()
    assert run_event(f"sleep 600 & echo $! > {pid_file}; wait", {}, {}, seconds=2) == "killed after 2 s"
    status = Path(f"/proc/{int(pid_file.read_text())}/status")
    while status.exists() and "Z (zombie)" not in status.read_text():
        assert time.monotonic() - begin < 60
        time.sleep(0.05)


def test_a_child_in_the_background_does_not_delay_the_run():
    begin = time.monotonic()
    assert run_event("sleep 30 &", {}, {}, seconds=20) == ""
    assert time.monotonic() - begin < 20


def test_a_command_that_reads_nothing_is_no_failure():
    assert run_event("true", {"message": "x" * 1_000_000}, {}) == ""


def test_an_error_of_the_early_checks_is_a_failure_without_a_start(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "sft",
        "--pretrain",
        "nowhere",
        "--dataset",
        "d.jsonl",
        "--output",
        "run",
        "--on_event",
        "cat > event.json",
    ]
    assert cli.main(words) == 2
    event = json.loads(Path("event.json").read_text())
    assert (event["event"], event["command"]) == ("failure", "sft")
    assert event["message"] in capsys.readouterr().err
    assert "nowhere" in event["message"]


def test_a_plan_is_no_event(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "sft", "--pretrain", "nowhere", "--on_event", "touch event"]) != 0
    assert not Path("event").exists()
