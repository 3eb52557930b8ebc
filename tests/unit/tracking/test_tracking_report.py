"""The report shows the contents of a run's files, and they cannot run scripts or load anything."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlhf_cli.models.vision.pictures import picture_of_pixels
from rlhf_cli.tracking.report.charts import Series, binned, line_chart, nice_ticks, smoothed, stacked_bars, tick_label
from rlhf_cli.tracking.report.data import read_rollouts, read_settings, read_stage
from rlhf_cli.tracking.report.page import chart_groups, packaged, write_report
from rlhf_cli.tracking.sinks import EVAL_SAMPLES_FILE, MetricsFile, SamplesFile
from rlhf_cli.tracking.thumbnails import WITH_IMAGES, Thumbnails

ATTACK = "</script ><script>alert(1)</script><img src=x onerror=alert(2)><!--<script "


def make_run(path: Path, *, command: str = "ppo", steps: int = 40, samples: bool = True) -> Path:
    metrics = MetricsFile(path, resume_step=None)
    for step in range(1, steps + 1):
        metrics.log(
            step,
            {
                "reward": step / 100,
                "kl": math.nan if step == 3 else 0.01 * step,
                "num_tokens": 50.0,
                "time/generate": 3.0,
                "time/train": 1.0,
                "time/step": 4.0,
                "perf/tokens_per_second": 12.5,
                "memory/host_gib": 2.5,
            },
        )
    metrics.log(steps, {"eval/accuracy": 0.8437})
    metrics.close()
    if samples:
        rows = [
            {"prompt": f"p{i}", "response": ATTACK, "label": "4", "reward": 0.5, "verdict": "wrong"} for i in range(3)
        ]
        SamplesFile(path, resume_step=None).write(steps, rows)
    facts = {"Model": "tiny <b>&</b>"}
    about = {"command": command, "unit": "iteration", "total_steps": steps, "facts": facts, "outcome": "finished"}
    (path / "run.json").write_text(json.dumps(about))
    (path / "config.yaml").write_text(f"# Model\npretrain: {json.dumps(ATTACK)}\nmax_len: 77\n\n# Output\noutput: x\n")
    return path


class Elements(HTMLParser):
    """Collects start tags with attributes, unclosed tags, and the text outside scripts."""

    VOID = frozenset({"meta", "input", "br", "img", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def page_of(output: Path, **options) -> str:
    return write_report(output, **options).read_text(encoding="utf-8")


def browsers_of(page: str) -> list[list[dict]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert not any("<" in text for text in found)  # no parser can end the element or start a comment
    return [json.loads(text) for text in found]


def rollouts_of(page: str) -> list[dict]:
    (rows,) = browsers_of(page)
    return rows


def test_numbers_of_the_report_are_those_of_the_metrics(tmp_path):
    page = page_of(make_run(tmp_path))
    text = " ".join(Elements(page).text)
    assert "0.4000" in text  # the last reward
    assert "0.8437" in text  # the evaluation
    assert "75.0%" in text  # generate: 3 of 4 seconds
    assert "2:00" in text  # 40 times 3 seconds
    assert "2:40" in text
    assert "40/40 iterations" in text
    assert "finished" in text
    assert "77" in text
    charts = [json.loads(attrs["data-chart"] or "") for tag, attrs in Elements(page).tags if tag == "svg"]
    reward = next(line for chart in charts for line in chart["s"] if line["n"] == "reward")
    assert reward["p"] == [[step, step / 100] for step in range(1, 41)]


def test_text_of_models_and_settings_cannot_act(tmp_path):
    page = page_of(make_run(tmp_path))
    elements = Elements(page)
    assert elements.open == []
    assert sum(tag == "script" for tag, _ in elements.tags) == 2  # the rollouts and the report's own script
    assert not any(tag in ("img", "b") and attrs for tag, attrs in elements.tags)
    assert not any(name.startswith("on") for _, attrs in elements.tags for name in attrs)
    assert "<script>alert" not in page
    assert [row["response"] for row in rollouts_of(page)] == [ATTACK] * 3
    assert "tiny <b>&</b>" in " ".join(elements.text)


def test_answers_of_evaluations_are_browsed_beside_the_rollouts(tmp_path):
    make_run(tmp_path)
    answers = SamplesFile(tmp_path, resume_step=None, name=EVAL_SAMPLES_FILE)
    for step in (0, 40):
        rows = [{"prompt": f"q{i}", "response": ATTACK, "label": "9", "reward": 1.0, "data": "sums"} for i in range(20)]
        answers.write(step, rows)
    page = page_of(tmp_path)
    elements = Elements(page)
    assert elements.open == []
    rollouts, evaluated = browsers_of(page)
    assert [row["prompt"] for row in rollouts] == ["p0", "p1", "p2"]
    assert [(row["step"], row["prompt"]) for row in evaluated] == [(s, f"q{i}") for s in (0, 40) for i in range(16)]
    text = " ".join(elements.text)
    assert text.index("Rollouts") < text.index("Evaluation samples")
    assert "3 of 3; all are in samples.jsonl" in text
    assert "32 of 40; all are in eval_samples.jsonl" in text
    assert "<script>alert" not in page


def test_page_loads_nothing(tmp_path):
    page = page_of(make_run(tmp_path))
    assert not re.search(r"https?:|@import|url\(|//cdn", page)
    for tag, attrs in Elements(page).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        assert "src" not in attrs
        assert str(attrs.get("href", "#")).startswith("#")


def test_values_that_are_not_finite_are_named(tmp_path):
    page = page_of(make_run(tmp_path))
    assert "non-finite value in iteration 3" in page
    assert "NaN" not in page.split("<script>")[0]


def test_run_without_samples_and_settings_has_a_report(tmp_path):
    make_run(tmp_path, command="sft", samples=False)
    (tmp_path / "config.yaml").unlink()
    page = page_of(tmp_path)
    assert ">Rollouts<" not in page
    assert ">Evaluation samples<" not in page
    assert ">Settings<" not in page
    assert Elements(page).open == []


def test_directory_where_nothing_ran_has_a_report(tmp_path):
    assert "has logged nothing yet" in page_of(tmp_path)


def test_run_of_one_step_has_a_report(tmp_path):
    assert "0.0100" in page_of(make_run(tmp_path, steps=1))


def test_stages_are_parts_of_one_page_in_their_order(tmp_path):
    sft, ppo = make_run(tmp_path / "a", command="sft", samples=False), make_run(tmp_path / "b")
    page = page_of(
        tmp_path, stages={"sft": sft, "ppo alone": ppo}, headline={"accuracy after ppo": 0.9731, "time": "4:12"}
    )
    assert page.index("<h2>sft</h2>") < page.index("<h2>ppo alone</h2>")
    assert "0.9731" in page
    assert "4:12" in page
    ids = [attrs["id"] for _, attrs in Elements(page).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_page_of_a_very_long_run_stays_small(tmp_path):
    page = page_of(make_run(tmp_path, steps=20_000))
    assert len(page) < 500_000
    assert "200" in page


def test_report_replaces_an_earlier_one_at_once(tmp_path):
    make_run(tmp_path)
    write_report(tmp_path)
    before = (tmp_path / "report.html").stat().st_ino
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_ino != before
    assert not list(tmp_path.glob("*.tmp"))


def test_selected_rollouts_are_spread_over_the_run_and_bounded(tmp_path):
    samples = SamplesFile(tmp_path, resume_step=None)
    for step in range(1, 201):
        samples.write(step, [{"response": f"{step}.{i}"} for i in range(20)])
    rollouts = read_rollouts(tmp_path / "samples.jsonl")
    steps = [row["step"] for row in rollouts.rows]
    assert rollouts.num_all == 4000
    assert len(rollouts.rows) == 640
    assert (steps[0], steps[-1]) == (1, 200)
    assert rollouts.rows[1] == {"step": 1, "response": "1.1"}


def test_very_long_response_is_cut_with_a_note(tmp_path):
    SamplesFile(tmp_path, resume_step=None).write(1, [{"response": "x" * 12_345}])
    text = read_rollouts(tmp_path / "samples.jsonl").rows[0]["response"]
    assert text == "x" * 12_000 + " … (345 more characters in samples.jsonl)"


def test_settings_are_grouped_by_the_comments_of_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text("# Model\npretrain: m\n\n# Reward\nreward_funcs:\n- exact\n")
    assert read_settings(tmp_path / "config.yaml") == {
        "Model": {"pretrain": "m"},
        "Reward": {"reward_funcs": ["exact"]},
    }


def test_line_is_drawn_where_its_values_are():
    drawing = line_chart([Series("loss", [(0, 0.0), (10, 4.0)])], unit="step", size=(162, 136))
    # Plot area: x from 50 to 150, y from 110 (value 0) to 10 (value 4).
    assert 'd="M50.0 110.0L150.0 10.0"' in drawing
    assert ">4<" in drawing
    assert ">step<" in drawing


def test_bars_are_as_high_as_their_seconds():
    drawing = stacked_bars(
        [1, 2], {"a": [1.0, 1.0], "b": [1.0, 3.0]}, colours={"a": "--c1", "b": "--c2"}, unit="step", size=(162, 136)
    )
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', drawing)]
    assert heights == [25.0, 25.0, 25.0, 75.0]  # 100 pixels for 4 seconds


def test_bins_are_means_of_neighbours():
    assert binned([(1, 1.0), (2, 3.0), (3, 5.0), (4, 9.0)], 2) == [(1.5, 2.0), (3.5, 7.0)]
    assert binned([(1, 1.0), (2, 3.0)], 2) == [(1.0, 1.0), (2.0, 3.0)]


def test_smoothing_is_centred_so_that_a_straight_line_stays_as_it_is():
    line = [(float(i), 2.0 * i) for i in range(100)]
    assert [value for _, value in smoothed(line)] == pytest.approx([value for _, value in line])
    middle = smoothed([(float(i), 24.0 if i == 24 else 0.0) for i in range(49)])
    assert middle[24][1] == pytest.approx(24.0 / 5)  # a window of 2 points on each side


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 4.0, [0, 1, 2, 3, 4]),
        (0.03, 0.97, [0.0, 0.5, 1.0]),
        (-0.02, 0.06, [-0.02, 0.0, 0.02, 0.04, 0.06]),
        (0.0, 0.0, [0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


def test_tick_labels_have_the_decimals_their_distance_needs():
    assert [tick_label(value, 0.05) for value in (0.0, 0.05, 1.5)] == ["0", "0.05", "1.50"]
    assert tick_label(3.0, 1.0) == "3"
    assert tick_label(2e-6, 1e-6) == "2e-6"
    assert tick_label(74_000.0, 2000.0) == "74.0k"


def test_pictures_of_the_first_samples_are_in_the_page(tmp_path):
    red = picture_of_pixels("red", np.full((600, 300, 3), (220, 40, 40), np.uint8))
    rows = [{"prompt": "p", "response": str(number), "images": (red,)} for number in range(WITH_IMAGES + 1)]
    kept = Thumbnails(tmp_path).rows(rows)
    assert [row.get("images") for row in kept] == [["sample_images/red.png"]] * WITH_IMAGES + [None]
    with Image.open(tmp_path / "sample_images" / "red.png") as image:
        assert image.size == (128, 256)
    make_run(tmp_path, samples=False)
    outside = {"prompt": "q", "response": "", "images": ["../secret.png", "/etc/passwd", 7, "sample_images/gone.png"]}
    SamplesFile(tmp_path, resume_step=None).write(1, [*kept, outside])
    found = read_rollouts(tmp_path / "samples.jsonl").images
    assert list(found) == ["sample_images/red.png"]
    page = write_report(tmp_path, stages={"sft": tmp_path}).read_text()
    assert page.count(found["sample_images/red.png"]) == 1


def test_samples_without_pictures_stay_as_they_are(tmp_path):
    rows = [{"prompt": "p", "response": "r"}]
    assert Thumbnails(tmp_path).rows(rows) == rows
    assert not (tmp_path / "sample_images").exists()


CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"program": ATTACK}}}
EPISODE = {
    "prompt": "p",
    "opening": ATTACK,
    "response": "It is 42.",
    "reward": 1.0,
    "verdict": "scored",
    "finish_reason": "length",
    "messages": [
        {"role": "assistant", "content": ATTACK, "tool_calls": [CALL]},
        {"role": "tool", "content": ATTACK, "name": ATTACK},
        {"role": "assistant", "content": "It is 42."},
    ],
    "turn_rewards": [0.25, 0.75],
}


def test_turns_of_episodes_are_in_the_page_and_cannot_act(tmp_path):
    make_run(tmp_path, samples=False)
    SamplesFile(tmp_path, resume_step=None).write(1, [EPISODE])
    page = page_of(tmp_path)
    (row,) = rollouts_of(page)
    assert (row["messages"], row["turn_rewards"]) == (EPISODE["messages"], [0.25, 0.75])
    assert "<script>alert" not in page
    assert Elements(page).open == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node")
@pytest.mark.parametrize(("rewards", "shown"), [([1, 2], [None, None, None, 1, None, 2]), ([], [None] * 6)])
def test_rewards_stand_at_the_turns_of_the_model_behind_examples_of_a_programs_own(rewards, shown):
    found = re.search(r"^function conversation.*?^}$", packaged("page.js"), re.MULTILINE | re.DOTALL)
    assert found is not None
    roles = ["user", "assistant", "user", "assistant", "user", "assistant"]
    messages = [{"role": role} for role in roles]
    source = (
        "const messageBlock = (message, heading, reward) => reward ?? null, answerHeading = () => '';\n"
        f"{found[0]}\nconsole.log(JSON.stringify(conversation({json.dumps(messages)}, {json.dumps(rewards)})))"
    )
    run = subprocess.run(["node", "-e", source], capture_output=True, check=True, timeout=60)
    assert json.loads(run.stdout) == shown


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node")
@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"turn_rewards": [0.0, 0.0], "reward/exact": 1.0}, []),
        ({"turn_rewards": [0.0, 0.5], "reward/exact": 1.0}, [0.0, 0.5]),
        ({"turn_rewards": [0.0, 0.0], "reward/environment": 0.0}, [0.0, 0.0]),
        ({"reward/environment": 0.0}, []),
    ],
    ids=["a verifier's score alone", "rewards beside a verifier", "rewards of an environment", "none"],
)
def test_turns_have_no_reward_of_zero_if_the_environment_has_none(row, shown):
    found = re.search(r"^function turnRewards.*?^}$", packaged("page.js"), re.MULTILINE | re.DOTALL)
    assert found is not None
    source = f"{found[0]}\nconsole.log(JSON.stringify(turnRewards({json.dumps(row)})))"
    run = subprocess.run(["node", "-e", source], capture_output=True, check=True, timeout=60)
    assert json.loads(run.stdout) == shown


def test_branches_of_an_episode_are_in_the_page_and_not_among_its_numbers(tmp_path):
    make_run(tmp_path, samples=False)
    branched = EPISODE | {
        "branches": [[{"role": "user", "content": ATTACK}, {"role": "assistant", "content": "early"}]]
    }
    SamplesFile(tmp_path, resume_step=None).write(1, [branched])
    page = page_of(tmp_path)
    (row,) = rollouts_of(page)
    assert row["branches"] == branched["branches"]
    assert "<script>alert" not in page
    assert re.search(r"const SHOWN = \[[^\]]*\"branches\"", page)


def test_long_texts_of_an_episode_are_cut_to_equal_shares(tmp_path):
    said = [{"role": "user", "content": "x" * 20_000, "tool_calls": [{"function": {"arguments": {"a": "y" * 20_000}}}]}]
    SamplesFile(tmp_path, resume_step=None).write(1, [{"messages": said * 10}, {"messages": said}])
    many, one = (row["messages"] for row in read_rollouts(tmp_path / "samples.jsonl").rows)
    assert len(many) == 10
    assert many[9]["content"] == "x" * 4_800 + " … (15200 more characters in samples.jsonl)"
    assert many[9]["tool_calls"][0]["function"]["arguments"]["a"].startswith("y" * 4_800 + " … (15200")
    assert one[0]["content"] == "x" * 12_000 + " … (8000 more characters in samples.jsonl)"


def test_charts_of_zeros_are_last(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    metrics.log(1, {"skipped_steps": 0.0, "loss": 0.5, "other_metric": 0.0})
    metrics.log(2, {"skipped_steps": 0.0, "loss": 0.0, "other_metric": 1.0})
    metrics.close()
    assert [names for _, names in chart_groups(read_stage(tmp_path))] == [["loss"], ["other_metric"], ["skipped_steps"]]


def test_alarms_are_in_the_page(tmp_path):
    (tmp_path / "alarms.jsonl").write_text(
        '{"step": 3, "alarm": "loss-spike", "message": "loss-spike in step 3: <b>"}\n'
    )
    assert "Alarm: loss-spike in step 3: &lt;b&gt;" in write_report(tmp_path).read_text()


def test_metrics_of_episodes_share_a_chart_with_titles_for_people(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    found = {"turns": 2.5, "calls": 1.5, "malformed_calls": 0.5, "observed_tokens": 40.0, "failed": 0.0}
    metrics.log(1, {"reward": 1.0, **{f"episode/{name}": value for name, value in found.items()}})
    metrics.close()
    headings = dict(chart_groups(read_stage(tmp_path)))
    assert headings["Turns and tool calls"] == ["episode/turns", "episode/calls", "episode/malformed_calls"]
    assert headings["observed tokens per episode"] == ["episode/observed_tokens"]
    assert headings["share of failed environments"] == ["episode/failed"]
