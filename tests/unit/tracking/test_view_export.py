"""report.html contains the data of a run's files, stays small, and cannot run scripts of others or load anything."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from viewed_runs import exported

from rlhf_cli.models.vision.pictures import picture_of_pixels
from rlhf_cli.tracking.sinks import EVAL_SAMPLES_FILE, MetricsFile, SamplesFile
from rlhf_cli.tracking.thumbnails import WITH_IMAGES, Thumbnails
from rlhf_cli.tracking.view.export import read_rollouts, record_report, write_report
from rlhf_cli.tracking.view.front_end import PAGE
from rlhf_cli.tracking.view.runs import read_settings

ATTACK = "</script ><script>alert(1)</script><img src=x onerror=alert(2)><!--<script "


def make_run(path: Path, *, command: str = "ppo", steps: int = 40, samples: bool = True) -> Path:
    metrics = MetricsFile(path, resume_step=None)
    for step in range(1, steps + 1):
        values = {"reward": step / 100, "num_tokens": 50.0, "time/generate": 3.0, "time/train": 1.0, "time/step": 4.0}
        metrics.log(step, {**values, "kl": math.nan if step == 3 else 0.01 * step})
    metrics.log(steps, {"eval/accuracy": 0.8437})
    metrics.close()
    if samples:
        rows = [{"prompt": f"p{i}", "response": ATTACK, "reward": 0.5, "verdict": "wrong"} for i in range(3)]
        SamplesFile(path, resume_step=None).write(steps, rows)
    facts = {"Model": "tiny <b>&</b>"}
    about = {"command": command, "unit": "iteration", "total_steps": steps, "facts": facts, "outcome": "finished"}
    (path / "run.json").write_text(json.dumps(about))
    (path / "config.yaml").write_text(f"# Model\npretrain: {json.dumps(ATTACK)}\nmax_len: 77\n\n# Output\noutput: x\n")
    return path


class Tags(HTMLParser):
    """Collects start tags with attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def run_of(output: Path) -> Any:
    (run,) = exported(write_report(output))["runs"]
    return run


def test_the_data_are_those_of_the_files(tmp_path):
    make_run(tmp_path)
    (tmp_path / "alarms.jsonl").write_text('{"step": 3, "alarm": "loss-spike", "message": "loss-spike: <b>"}\n')
    run = run_of(tmp_path)
    records = run["metrics"]["records"]
    assert [record["reward"] for record in records[:40]] == [step / 100 for step in range(1, 41)]
    assert records[2]["kl"] == "NaN"
    assert records[40] == {"step": 40, "eval/accuracy": 0.8437}
    assert run["metrics"]["titles"]["kl"] == "KL from reference"
    assert run["settings"] == {"Model": {"pretrain": ATTACK, "max_len": 77}, "Output": {"output": "x"}}
    assert (run["outcome"], run["facts"]) == ("finished", {"Model": "tiny <b>&</b>"})
    assert run["alarms"] == ["loss-spike: <b>"]


def test_text_of_models_and_settings_cannot_act(tmp_path):
    report = write_report(make_run(tmp_path))
    page = report.read_text()
    found = Tags(page).found
    # The import map, uPlot, the page's module and the data.
    assert sum(tag == "script" for tag, _ in found) == 4
    assert not any(tag in ("img", "b") for tag, _ in found)
    assert not any(name.startswith("on") for _, attrs in found for name in attrs)
    assert "<script>alert" not in page
    (run,) = exported(report)["runs"]
    assert [row["response"] for row in run["samples"]["samples.jsonl"]["rows"]] == [ATTACK] * 3


def test_the_page_may_load_only_what_it_contains(tmp_path):
    found = Tags(write_report(make_run(tmp_path)).read_text()).found
    (policy,) = [attrs["content"] or "" for _, attrs in found if "http-equiv" in attrs]
    assert "default-src 'none'" in policy
    assert set(re.findall(r"(?:script|style|img)-src ([\w:]+)", policy)) == {"data:"}
    assert "unsafe" not in policy
    addresses = [value for _, attrs in found for name, value in attrs.items() if name in ("src", "href")]
    assert len(addresses) == 5
    assert all((value or "").startswith("data:") for value in addresses)


def test_samples_of_evaluations_are_in_the_page(tmp_path):
    make_run(tmp_path)
    samples = SamplesFile(tmp_path, resume_step=None, name=EVAL_SAMPLES_FILE)
    for step in (0, 40):
        samples.write(step, [{"prompt": f"q{i}", "response": ATTACK, "reward": 1.0} for i in range(20)])
    files = run_of(tmp_path)["samples"]
    assert [row["prompt"] for row in files["samples.jsonl"]["rows"]] == ["p0", "p1", "p2"]
    evaluated = files["eval_samples.jsonl"]
    places = [(row["step"], row["prompt"]) for row in evaluated["rows"]]
    assert places == [(step, f"q{i}") for step in (0, 40) for i in range(16)]
    assert [row["number"] for row in evaluated["rows"]] == [*range(1, 17), *range(21, 37)]
    assert evaluated["all"] == 40


def test_a_folder_without_files_has_a_report(tmp_path):
    run = run_of(tmp_path)
    assert (run["metrics"]["records"], run["settings"], run["samples"]) == ([], {}, {})


def test_runs_are_in_one_page_in_their_order(tmp_path):
    sft, ppo = make_run(tmp_path / "a", command="sft", samples=False), make_run(tmp_path / "b")
    headline: dict[str, float | str] = {"accuracy after ppo": 0.9731, "time": "4:12"}
    data = exported(write_report(tmp_path, stages={"sft": sft, "ppo alone": ppo}, headline=headline))
    assert [(run["number"], run["name"], run["path"]) for run in data["runs"]] == [
        (0, "sft", str(sft)),
        (1, "ppo alone", str(ppo)),
    ]
    assert data["headline"] == [["accuracy after ppo", 0.9731], ["time", "4:12"]]


def test_a_long_run_is_averaged_with_equal_totals(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    for step in range(1, 1201):
        metrics.log(step, {"reward": float(step), "time/step": 2.0, **({"time/eval": 30.0} if step % 3 == 0 else {})})
        if step % 600 == 0:
            metrics.log(step, {"eval/accuracy": step / 1200})
    metrics.close()
    records = run_of(tmp_path)["metrics"]["records"]
    # 1200 steps in at most 500 records: 3 steps each. The mean time of evaluations counts the steps without one.
    first = {"step": 3, "reward": 2.0, "time/step": 2.0, "time/eval": 10.0, "averaged": 3}
    assert (len(records), records[0]) == (402, first)
    assert records[400:] == [{"step": 600, "eval/accuracy": 0.5}, {"step": 1200, "eval/accuracy": 1.0}]


def test_page_of_a_very_long_run_stays_small(tmp_path):
    assert write_report(make_run(tmp_path, steps=20_000)).stat().st_size < 300_000


def test_report_replaces_an_earlier_one_at_once(tmp_path):
    make_run(tmp_path)
    write_report(tmp_path)
    before = (tmp_path / "report.html").stat().st_ino
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_ino != before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_report_that_fails_is_logged(tmp_path, capsys):
    (make_run(tmp_path) / "config.yaml").write_text("seed: [")
    record_report(tmp_path)
    assert "report.html was not written: " in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_selected_samples_are_spread_over_the_run_and_bounded(tmp_path):
    samples = SamplesFile(tmp_path, resume_step=None)
    for step in range(1, 201):
        samples.write(step, [{"response": f"{step}.{i}"} for i in range(20)])
    found = read_rollouts(tmp_path / "samples.jsonl")
    steps = [row["step"] for row in found["rows"]]
    assert (found["all"], len(steps), steps[0], steps[-1]) == (4000, 640, 1, 200)
    assert found["rows"][1] | {"prompt_number": 0} == {"step": 1, "response": "1.1", "number": 2, "prompt_number": 0}


def test_very_long_response_is_truncated_with_a_note(tmp_path):
    SamplesFile(tmp_path, resume_step=None).write(1, [{"response": "x" * 12_345}])
    text = read_rollouts(tmp_path / "samples.jsonl")["rows"][0]["response"]
    assert text == "x" * 12_000 + " … (345 more characters in samples.jsonl)"


def test_long_texts_of_an_episode_are_truncated_to_equal_shares(tmp_path):
    said = [{"role": "user", "content": "x" * 20_000, "tool_calls": [{"function": {"arguments": {"a": "y" * 20_000}}}]}]
    SamplesFile(tmp_path, resume_step=None).write(1, [{"messages": said * 10}, {"messages": said}])
    many, one = (row["messages"] for row in read_rollouts(tmp_path / "samples.jsonl")["rows"])
    assert len(many) == 10
    assert many[9]["content"] == "x" * 4_800 + " … (15200 more characters in samples.jsonl)"
    assert many[9]["tool_calls"][0]["function"]["arguments"]["a"].startswith("y" * 4_800 + " … (15200")
    assert one[0]["content"] == "x" * 12_000 + " … (8000 more characters in samples.jsonl)"


def test_settings_are_grouped_by_the_comments_of_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text("# Model\npretrain: m\n\n# Reward\nreward_funcs:\n- exact\n")
    assert read_settings(tmp_path / "config.yaml") == {
        "Model": {"pretrain": "m"},
        "Reward": {"reward_funcs": ["exact"]},
    }


def test_images_of_the_first_samples_are_in_the_page(tmp_path):
    red = picture_of_pixels("red", np.full((600, 300, 3), (220, 40, 40), np.uint8))
    rows = [{"prompt": "p", "response": str(number), "images": (red,)} for number in range(WITH_IMAGES + 1)]
    kept = Thumbnails(tmp_path).rows(rows)
    assert [row.get("images") for row in kept] == [["sample_images/red.png"]] * WITH_IMAGES + [None]
    with Image.open(tmp_path / "sample_images" / "red.png") as image:
        assert image.size == (128, 256)
    make_run(tmp_path, samples=False)
    outside = {"prompt": "q", "response": "", "images": ["../secret.png", "/etc/passwd", 7, "sample_images/gone.png"]}
    SamplesFile(tmp_path, resume_step=None).write(1, [*kept, outside])
    report = write_report(tmp_path)
    (run,) = exported(report)["runs"]
    assert list(run["images"]) == ["sample_images/red.png"]
    assert report.read_text().count(run["images"]["sample_images/red.png"]) == 1


def test_samples_without_images_stay_as_they_are(tmp_path):
    rows = [{"prompt": "p", "response": "r"}]
    assert Thumbnails(tmp_path).rows(rows) == rows
    assert not (tmp_path / "sample_images").exists()


def test_scripts_insert_no_markup():
    for script in PAGE.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text())


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node")
@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"turn_rewards": [0.0, 0.0], "reward/exact": 1.0}, []),
        ({"turn_rewards": [0.0, 0.5], "reward/exact": 1.0}, [0.0, 0.5]),
        ({"turn_rewards": [0.0, 0.0], "reward/environment": 0.0}, [0.0, 0.0]),
        ({"reward/environment": 0.0}, []),
    ],
    ids=["only a verifier's score", "rewards and a verifier", "rewards of an environment", "none"],
)
def test_turns_have_no_reward_of_zero_if_the_environment_has_none(row, shown):
    found = re.search(r"^function turnRewards.*?^}$", (PAGE / "sample.js").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    source = f"{found[0]}\nconsole.log(JSON.stringify(turnRewards({json.dumps(row)})))"
    run = subprocess.run(["node", "-e", source], capture_output=True, check=True, timeout=60)
    assert json.loads(run.stdout) == shown
