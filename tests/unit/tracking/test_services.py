"""Trackers of other packages: tables of samples, one ID per run, missing packages, and servers that do not answer.

A tracker that is installed runs for real, without a network.
"""

import io
import json
import re
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.tracking import services
from rlhf_cli.tracking.sample_table import COLUMNS, markdown, sample_table, spread
from rlhf_cli.tracking.services import Service, SinkContext, check_wandb_key
from rlhf_cli.tracking.sinks import check_tracking
from rlhf_cli.tracking.tracker import Tracker

ROWS = [
    {"id": f"d:{row}/0.0@0", "prompt": "2 | 2?", "response": f"*{row}*\nfour", "reward": row / 2, "advantage": None}
    for row in range(8)
]


def track(config: TrackingConfig, output: Path, *, steps, resume_step=None, saved=None, shown=None) -> dict:
    """Report metrics and samples of each step, and an alarm in step 2; return the state of the trackers."""
    output.mkdir(exist_ok=True)
    (output / "config.yaml").write_text("".join(f"setting{number}: {number}\n" for number in range(101)))
    console = Console(file=shown or io.StringIO(), width=300)
    opened = {"command": "ppo", "total_steps": 3, "console": console, "resume_step": resume_step, "saved": saved}
    with Tracker(config, output, **opened) as tracker:
        for step in steps:
            metrics = {"reward": step / 4, "reward/odd@name": 1.0, "kl": float("nan"), "grad_norm": 1.0}
            tracker.log(step, {**metrics, "approx_k3": float(step == 2)}, {"train": 0.1})
            tracker.samples(step, ROWS)
        tracker.close()
        return json.loads(json.dumps(tracker.state()))


def resumed(name: str, output: Path) -> tuple[dict, dict]:
    """Track steps 1 and 2, then resume after step 1 and track 2 and 3. Returns both states."""
    config = TrackingConfig(use_tensorboard=False, **{f"use_{name}": True})
    first = track(config, output, steps=(1, 2))
    return first, track(config, output, steps=(2, 3), resume_step=1, saved=first)


def test_the_table_has_rows_of_all_prompts_and_the_ends_of_long_texts() -> None:
    assert [str(row["id"])[2] for row in spread(ROWS, 4)] == ["0", "2", "4", "6"]
    assert list(spread(ROWS, 9)) == ROWS
    long = {"id": "d:0/0.0@0", "prompt": "a" * 5000 + "b", "response": "\ud800", "reward": 1}
    (row,) = sample_table([long], 4)
    assert (row[0], row[2], row[3], row[4]) == ("d:0/0.0@0", "?", 1.0, None)
    prompt = str(row[1])
    assert (len(prompt), prompt[:2], prompt[-2:], prompt.count("…")) == (3999, "aa", "ab", 1)


def test_markup_in_a_response_is_text_in_the_markdown_table() -> None:
    page = markdown_to_safe_html(
        markdown(sample_table([{"response": "|a*b*\n<i>_c_</i> [d](e) `f`", "reward": 0.5}], 1))
    )
    cells = [unescape(cell.split("</td>")[0]) for cell in page.split("<td>")[1:]]
    assert cells == ["", "", "|a*b*<br><i>_c_</i> [d](e) `f`", "0.5", "none"]
    assert not {"<i>", "<em>", "<code>", "<a "} & set(re.findall(r"<\w+[> ]", page))


def test_tensorboard_shows_four_samples_per_iteration_or_as_many_as_are_printed(tmp_path) -> None:
    track(TrackingConfig(), tmp_path / "four", steps=(1,))
    track(TrackingConfig(print_samples=2), tmp_path / "two", steps=(1,))
    for name, number in (("four", 4), ("two", 2)):
        events = EventAccumulator(str(tmp_path / name / "tensorboard"))
        events.Reload()
        (event,) = events.Tensors("samples/text_summary")
        assert event.tensor_proto.string_val[0].decode().count("\n") == number + 1


def test_tensorboard_shows_alarms(tmp_path) -> None:
    track(TrackingConfig(), tmp_path / "run", steps=(1, 2))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("alarms/text_summary")
    assert event.step == 2
    assert event.tensor_proto.string_val[0].decode().startswith("kl-spike in step 2: ")


class FakeWandb:
    """Records calls to wandb. With `is_offline`, its server does not answer."""

    Settings = staticmethod(lambda **given: given)
    Table = staticmethod(lambda **given: given)

    def __init__(self, *, is_offline: bool = False) -> None:
        self.is_offline = is_offline
        self.given: dict = {}
        self.logged: list[dict] = []
        self.alerts: list[dict] = []
        self.exits: list[int] = []

    def teardown(self) -> None:
        self.given = {}

    def init(self, **given):
        if self.is_offline and given.get("mode") != "offline":
            raise OSError("no answer\nin 30 s")
        self.given = given
        return SimpleNamespace(
            id=given["id"] or "abc123",
            define_metric=lambda *names, **options: None,
            log=self.logged.append,
            alert=lambda **given: self.alerts.append(given),
            finish=lambda exit_code: self.exits.append(exit_code),
        )


def test_a_resumed_run_continues_the_wandb_run_with_its_id(tmp_path, monkeypatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    first, second = resumed("wandb", tmp_path / "run7")
    assert first == second == {"wandb_run_id": "abc123"}
    assert (wandb.given["id"], wandb.given["resume"], wandb.given["name"]) == ("abc123", "allow", "run7")
    assert wandb.given["config"]["setting3"] == 3
    assert [line["step"] for line in wandb.logged] == [1, 1, 2, 2, 2, 2, 3, 3]
    assert [alert["title"] for alert in wandb.alerts] == ["kl-spike", "kl-spike"]
    assert wandb.logged[1]["samples"]["columns"] == list(COLUMNS)
    assert wandb.logged[1]["samples"]["data"][1] == ["d:2/0.0@0", "2 | 2?", "*2*\nfour", 1.0, None]


def test_a_tracker_receives_the_outcome_of_the_run(tmp_path, monkeypatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = TrackingConfig(use_tensorboard=False, use_wandb=True)
    track(config, tmp_path / "run", steps=(1,))
    with pytest.raises(TypeError):
        track(config, tmp_path / "run", steps=(1, None))
    assert wandb.exits == [0, 1]


def test_without_a_server_the_wandb_run_is_recorded_offline_under_its_id(tmp_path, monkeypatch) -> None:
    wandb, shown = FakeWandb(is_offline=True), io.StringIO()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = TrackingConfig(use_tensorboard=False, use_wandb=True)
    track(config, tmp_path / "run", steps=(2,), resume_step=1, saved={"wandb_run_id": "x1"}, shown=shown)
    assert (wandb.given["mode"], wandb.given["id"], len(wandb.logged)) == ("offline", "x1", 2)
    assert "Weights & Biases cannot be used (no answer). The run is recorded offline; upload it" in shown.getvalue()


class Server:
    """A tracker's server that answers only while `is_up`. A call needs a second of the clock."""

    def __init__(self) -> None:
        self.is_up, self.now, self.calls = False, 0.0, 0
        self.logged: list[int] = []
        self.run_id = "new"

    def log(self, step: int, metrics: object) -> None:
        self.calls, self.now = self.calls + 1, self.now + 1
        if not self.is_up:
            raise ConnectionError("refused")
        self.logged.append(step)

    def close(self, outcome: str) -> None:
        self.log(0, {})


def test_a_server_that_fails_is_one_warning_and_is_tried_again_after_a_pause(tmp_path, monkeypatch) -> None:
    server = Server()
    warnings: list[str] = []
    monkeypatch.setattr(services.time, "monotonic", lambda: server.now)
    run = SinkContext(tmp_path, TrackingConfig(), {}, None, {}, warn=warnings.append)
    service = Service("Tracker", "key", lambda run, run_id: server, run)
    for step in range(1, 12):
        service.log(step, {})
        server.now += 1
    # Calls at 0 and 12 s: the first needed 1 s, so nothing is sent in the 10 s after it.
    assert (server.calls, server.logged, len(warnings)) == (2, [], 1)
    assert warnings[0].startswith("Warning: Tracker fails (refused). The run continues")
    server.is_up, server.now = True, 100.0
    service.log(20, {})
    service.close()
    assert (server.logged, service.state()) == ([20, 0], {"key": "new"})


def test_a_service_that_never_opens_keeps_the_id_of_the_run(tmp_path) -> None:
    run = SinkContext(tmp_path, TrackingConfig(), {}, 1, {"key": "old", "other": 1}, warn=lambda text: None)
    service = Service("Tracker", "key", lambda run, run_id: 1 / 0, run)
    service.log(2, {})
    service.close()
    assert service.state() == {"key": "old"}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_missing_package_is_one_sentence_with_the_command_to_install_it(name, tmp_path, monkeypatch) -> None:
    # A folder with offline runs, in the working directory, is not the package.
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=rf"--use_{name} requires .*: pip install 'rlhf-cli\[{name}\]'"):
        check_tracking(TrackingConfig(**{f"use_{name}": True}))


def test_wandb_without_a_key_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="WANDB_API_KEY"):
        check_wandb_key({}, netrc=tmp_path / "none")
    check_wandb_key({"WANDB_API_KEY": "k"}, netrc=tmp_path / "none")
    check_wandb_key({"WANDB_MODE": "offline"}, netrc=tmp_path / "none")


def test_an_installed_wandb_writes_offline_runs_with_one_id(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = resumed("wandb", tmp_path / "run")
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/*.json"))
    assert first == second
    assert {path.parts[-5].rpartition("-")[2] for path in files} == {first["wandb_run_id"]}
    assert len(files) == 4
    assert json.loads(files[0].read_text())["columns"] == list(COLUMNS)


def test_an_installed_mlflow_has_one_run_with_settings_metrics_and_a_table(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    first, second = resumed("mlflow", tmp_path / "run")
    assert first == second
    client = mlflow.MlflowClient()
    run = client.get_run(first["mlflow_run_id"])
    assert (run.info.status, len(run.data.params), run.data.metrics["reward/odd_name"]) == ("FINISHED", 101, 1.0)
    assert run.data.tags["alarm.kl-spike"].startswith("kl-spike in step 2: ")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "reward")] == [1, 2, 2, 3]
    table = client.load_table(run.info.experiment_id, "samples/000000-000099.json", [run.info.run_id])
    assert (list(table.columns), list(table["step"])) == (["step", *COLUMNS], [1] * 4 + [2] * 8 + [3] * 4)
    with pytest.raises(TypeError):
        track(TrackingConfig(use_tensorboard=False, use_mlflow=True), tmp_path / "broken", steps=(1, None))
    (broken,) = client.search_runs([run.info.experiment_id], "attributes.run_name = 'broken'")
    assert broken.info.status == "FAILED"


def test_an_installed_trackio_has_one_run_with_metrics_and_tables(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    first, second = resumed("trackio", tmp_path / "run")
    assert first == second
    logs = SQLiteStorage.get_logs("rlhf-cli", first["trackio_run_id"])
    assert [(line["step"], line["reward"]) for line in logs if "reward" in line] == [
        (1, 0.25),
        (2, 0.5),
        (2, 0.5),
        (3, 0.75),
    ]
    (alert,) = SQLiteStorage.get_alerts("rlhf-cli", first["trackio_run_id"])[:1]
    assert (alert["title"], alert["step"]) == ("kl-spike", 2)
    tables = [line["samples"]["_value"] for line in logs if "samples" in line]
    assert (len(tables), list(tables[0][0])) == (4, list(COLUMNS))


def test_an_installed_swanlab_writes_offline_runs_with_one_id(tmp_path, monkeypatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    first, second = resumed("swanlab", tmp_path / "run")
    files = list((tmp_path / "run" / "swanlog").glob("run-*/media/echarts/*.json"))
    assert first == second
    assert all(path.parts[-4].endswith(first["swanlab_run_id"]) for path in files)
    assert [row["field"] for row in json.loads(files[0].read_text())["colDefs"]] == list(COLUMNS)


def test_an_installed_swanlab_without_a_key_is_refused(tmp_path, monkeypatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with pytest.raises(UsageError, match="SWANLAB_API_KEY"):
        check_tracking(TrackingConfig(use_swanlab=True))
