"""Custom trackers: the documented example receives the metrics, and a class without the methods is rejected."""

import io
import json
from functools import partial

import pytest
from extending_page import page_file
from online_settings import resolve
from rich.console import Console

from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.errors import UsageError
from rlhf_cli.tracking.tracker import Tracker


def run_steps(config, output, *, steps, resume_step=None) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Tracker(config, output, command="ppo", total_steps=3, console=console, resume_step=resume_step) as tracker:
        for step in steps:
            tracker.log(step, {"reward": step / 4}, {"train": 0.1})
        tracker.close()


def test_the_page_s_tracker_writes_the_course_of_a_run_that_is_continued(tmp_path) -> None:
    path = page_file(tmp_path, "csv_tracker.py")
    config = resolve("rloo", tracker=f"{path}:CsvTracker", use_tensorboard=False)
    require_plugins(config)
    run_steps(config.tracking, tmp_path / "run", steps=(1, 2, 3))
    run_steps(config.tracking, tmp_path / "run", steps=(3,), resume_step=2)
    assert (tmp_path / "run" / "course.csv").read_text().split() == ["1,reward,0.25", "2,reward,0.5", "3,reward,0.75"]


def test_a_tracker_gets_the_settings_of_the_run(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, folder, settings, step): (folder / 'seen').write_text(str(settings['seed']))\n"
        "    def log(self, step, metrics): pass\n"
        "    def close(self): pass\n"
    )
    config = resolve("rloo", tracker=f"{tmp_path}/own.py:Own", use_tensorboard=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 7\n")
    run_steps(config.tracking, run, steps=())
    assert (run / "seen").read_text() == "7"


def test_a_tracker_gets_samples_and_its_saved_state_if_it_has_the_methods(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, folder, settings, step): self.folder, self.seen = folder, []\n"
        "    def log(self, step, metrics): pass\n"
        "    def samples(self, step, rows): self.seen += [[step, row['response']] for row in rows]\n"
        "    def evaluation_samples(self, step, rows): self.seen += [['eval', row['response']] for row in rows]\n"
        "    def state(self): return {'seen': self.seen}\n"
        "    def load_state(self, state): self.seen = state['seen']\n"
        "    def close(self): pass\n"
    )
    tracking = resolve("rloo", tracker=f"{tmp_path}/own.py:Own", use_tensorboard=False).tracking
    console = Console(file=io.StringIO())
    run = partial(Tracker, tracking, tmp_path / "run", command="rloo", total_steps=2, console=console)
    with run(resume_step=None) as first:
        first.samples(1, [{"response": "a"}, {"response": "b"}])
        first.evaluation_samples(1, [{"response": "c"}])
        saved = json.loads(json.dumps(first.state()))
    assert saved == {"seen": [[1, "a"], [1, "b"], ["eval", "c"]]}
    with run(resume_step=1, saved=saved) as second:
        second.samples(2, [{"response": "d"}])
        assert second.state() == {"seen": [[1, "a"], [1, "b"], ["eval", "c"], [2, "d"]]}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "class Own:\n    def __init__(self, folder, settings, step): pass",
            "Own has no method log; it needs log",
        ),
        (
            "class Own:\n    def log(self): pass\n    def close(self): pass",
            "Own has to take 3 arguments: run_",
        ),
    ],
)
def test_a_class_of_another_form_is_refused(code, reason, tmp_path) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UsageError, match=reason):
        require_plugins(resolve("rloo", tracker=f"{tmp_path}/own.py:Own"))
