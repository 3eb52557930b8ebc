"""End-to-end test of `rlhf quickstart`: from no files to a model that adds."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from documented_blocks import REPOSITORY, add_program, marked_blocks, shell, write_named_files
from nbclient import NotebookClient
from site_hooks import undocumented
from viewed_runs import exported

from rlhf_cli.runs.walkthroughs import SumsWalkthrough

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

NOTEBOOKS = REPOSITORY / "examples" / "notebooks"
LEARN = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem == "grpo" else [])
    for page in sorted((REPOSITORY / "docs" / "learn").glob("*.md"))
    if "on the quickstart -->" in page.read_text()
]
SEED = 1
OTHERS = (
    "grpo",
    "reinforce++",
    "rloo",
    "remax",
    "reinforce++ --baseline group",
    "grpo --preset dr_grpo",
    "grpo --preset dapo",
    "grpo --preset gspo",
    "grpo --preset cispo",
    "grpo --preset sapo",
    "grpo --advantage passk",
    "grpo --aggregate normalize_then_sum --use_kl_loss --kl_estimator k3",
)


def rlhf(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_cli", *words], capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def accuracies(folder: Path) -> list[float]:
    """Return the accuracies after imitation and after practice."""
    results = json.loads((folder / "eval" / "eval.json").read_text())["results"]
    return [result["figures"]["accuracy"]["value"] for result in results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quickstart") / "first"


@pytest.fixture(scope="module")
def output(folder) -> str:
    return rlhf("quickstart", "--output", str(folder), "--seed", str(SEED), "--overwrite")  # a retry finds the folder


def test_ppo_makes_a_model_right_that_was_right_a_third_of_the_time(folder, output):
    before, after = accuracies(folder)
    assert 0.2 < before < 0.6
    assert after >= 0.95
    report = exported(folder / "report.html")
    assert "accuracy after ppo" in dict(report["headline"])
    for command, run in (("sft", "sft"), ("ppo", "practice")):
        rows = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
        assert not undocumented(command, {name for row in rows for name in row} - {"step"})
    printed = [shlex.split(line)[2:] for line in output.splitlines() if line.startswith("$ rlhf ")]
    assert [command[0] for command in printed] == ["scratch", "sft", "ppo", "eval"]


@pytest.mark.usefixtures("output")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_on_its_files(folder, tmp_path, path):
    (tmp_path / "quickstart").symlink_to(folder)
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    tables = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "text/html" in output.get("data", ())
    ]
    assert len(tables) >= 2


@pytest.mark.usefixtures("output")
@pytest.mark.parametrize("page", LEARN)
def test_blocks_of_learn_pages_run_on_its_files(folder, tmp_path, page):
    (tmp_path / "quickstart").symlink_to(folder)
    add_program(tmp_path)
    write_named_files(page, tmp_path)
    for block in marked_blocks(page, "runs on the quickstart"):
        shell(block, tmp_path)
    for block in marked_blocks(page, "finds faults on the quickstart"):
        shell(block, tmp_path, codes=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("words", OTHERS)
@pytest.mark.usefixtures("output")
def test_other_algorithms_teach_the_same_model(folder, tmp_path, words):
    algorithm, *flags = words.split()
    for part in ("data", "sft"):
        (tmp_path / part).symlink_to(folder / part)
    walk = SumsWalkthrough(tmp_path, SEED, algorithm)
    practice = walk.practice() + flags
    evaluation = walk.evaluation()
    evaluation[evaluation.index("--pretrain") + 1] = str(tmp_path / "practice")  # what sft does is known by now
    for command in (practice, evaluation):
        rlhf(*command)
    (after,) = accuracies(tmp_path)
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_the_model_that_imitated_reaches_the_one_that_practised_by_its_log_probs_alone(folder, tmp_path):
    practice = SumsWalkthrough(folder, SEED, "reinforce++").practice()
    del practice[practice.index("--reward_funcs") : practice.index("--reward_funcs") + 2]
    practice[practice.index("--output") + 1] = str(tmp_path / "distilled")
    rlhf(*practice, "--teacher_pretrain", str(folder / "practice"))
    evaluation = SumsWalkthrough(folder, SEED).evaluation()
    evaluation[evaluation.index("--pretrain") + 1] = f"{folder / 'practice'},{tmp_path / 'distilled'}"
    evaluation[evaluation.index("--output") + 1] = str(tmp_path / "eval")
    rlhf(*evaluation)
    teacher, student = accuracies(tmp_path)
    assert student >= teacher - 0.03
    course = [json.loads(line) for line in (tmp_path / "distilled" / "metrics.jsonl").open()]
    assert course[-1]["teacher_kl"] < course[0]["teacher_kl"] / 4


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_the_model_that_imitated_reaches_the_one_that_practised_by_its_distributions_over_own_responses(
    folder, tmp_path
):
    practice = SumsWalkthrough(folder, SEED, "gkd").practice()
    practice[practice.index("--output") + 1] = str(tmp_path / "distilled")
    rlhf(*practice, "--teacher_pretrain", str(folder / "practice"), "--lmbda", "1")
    evaluation = SumsWalkthrough(folder, SEED).evaluation()
    evaluation[evaluation.index("--pretrain") + 1] = f"{folder / 'practice'},{tmp_path / 'distilled'}"
    evaluation[evaluation.index("--output") + 1] = str(tmp_path / "eval")
    rlhf(*evaluation)
    teacher, student = accuracies(tmp_path)
    assert student >= teacher - 0.03
    course = [json.loads(line) for line in (tmp_path / "distilled" / "metrics.jsonl").open()]
    assert course[-1]["forward_kl"] < course[0]["forward_kl"] / 4
    assert course[-1]["accuracy"] > course[0]["accuracy"] + 0.2


@pytest.mark.slow
def test_grpo_teaches_a_model_to_call_a_calculator_without_which_it_learns_little(tmp_path):
    root = tmp_path / "calculator"
    printed = rlhf("quickstart", "--environment", "calculator", "--output", str(root), "--seed", str(SEED))
    found = {
        (evaluation, Path(result["pretrain"]).name): result["figures"]["accuracy"]["value"]
        for evaluation in ("eval", "eval_alone")
        for result in json.loads((root / evaluation / "eval.json").read_text())["results"]
    }
    assert found["eval", "sft"] < 0.3
    assert found["eval", "practice"] >= 0.9
    assert found["eval_alone", "practice_alone"] < 0.3
    commands = [shlex.split(line)[2] for line in printed.splitlines() if line.startswith("$ rlhf ")]
    assert commands == ["scratch", "sft", "grpo", "grpo", "eval", "eval"]
    report = exported(root / "report.html")
    assert {"accuracy with calculator after grpo", "accuracy alone after grpo alone"} <= dict(report["headline"]).keys()
    assert [run["name"] for run in report["runs"]] == ["sft", "grpo", "grpo alone"]
    turns = json.dumps(report["runs"][1]["samples"]["samples.jsonl"]["rows"])
    assert '"function": {"name": "calculate", "arguments": {"terms": ' in turns


@pytest.mark.slow
def test_grpo_teaches_a_model_to_look_that_learned_from_guesses(tmp_path):
    rlhf("quickstart", "--images", "--output", str(tmp_path / "pictures"), "--seed", str(SEED))
    results = json.loads((tmp_path / "pictures" / "eval" / "eval.json").read_text())["results"]
    found = {
        (Path(result["pretrain"]).name, Path(result["source"]).stem): result["figures"]["accuracy"]["value"]
        for result in results
    }
    assert found["sft", "held_out_colour"] < 0.45
    assert found["sft", "held_out_count"] < 0.45
    assert found["practice", "held_out_colour"] >= 0.9
    assert found["practice", "held_out_count"] >= 0.6
    assert "data:image/png;base64," in (tmp_path / "pictures" / "report.html").read_text()
