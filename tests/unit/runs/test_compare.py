"""`rlhf compare`: pairing, statistics, refusals, kept evaluations and the search over checkpoints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands.compare import CompareConfig
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.inference import compare
from rlhf_cli.runs.inference.bisection import Bisection, Point, RecordedRun, bisected, first_true, recorded_run
from rlhf_cli.runs.inference.compare import run_compare
from rlhf_cli.runs.inference.outputs import EvalOutput, output_folder, read_outputs
from rlhf_cli.runs.inference.paired import Paired, compared


def write_output(
    root: Path, scores: Mapping[str, Sequence[Sequence[float]]], *, first: int = 0, **settings: Any
) -> Path:
    """Write an output of `rlhf eval` with these scores by model: of each prompt from number `first`, its samples."""
    values = {"prompt_data": f"{root.parent}/sums.jsonl", "reward_funcs": "gsm8k", "temperature": 1.0}
    num_samples = len(next(iter(scores.values()))[0])
    config = build_config(
        EvalConfig, {**values, "pretrain": ",".join(scores), "n_samples_per_prompt": num_samples, **settings}
    )
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text(to_yaml(config))
    identity = {"command": "eval", "pretrain": ",".join(scores), "temperature": config.sampling.temperature}
    identity |= {f"fingerprint of the weights of {name}": name for name in scores}
    (root / "generation.json").write_text(json.dumps(identity))
    rows = [
        {
            "step": 1,
            "pretrain": model,
            "source": str(root.parent / "sums.jsonl"),
            "row": first + number,
            "group": number,
            "prompt": [{"role": "user", "content": f"sum {first + number}"}],
            "label": str(first + number),
            "response": f"{model} says {score}",
            "reward": score,
            "verdict": "correct" if score == 1 else "wrong",
            "detail": "",
            "answer": str(score),
            "length": 5,
            "finish_reason": "stop",
        }
        for model, of_model in scores.items()
        for number, samples in enumerate(of_model)
        for score in samples
    ]
    (root / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "eval.json").write_text("{}")
    return root


def settings(*models: object, **values: object) -> CompareConfig:
    return build_config(CompareConfig, {"models": [str(model) for model in models], **values})


def pair(first: Sequence[float], second: Sequence[float]) -> Paired:
    return Paired([float(value) for value in first], [float(value) for value in second])


def test_a_difference_is_the_mean_over_prompts_with_its_interval():
    # 10 prompts gain 1, 2 lose 1, 28 are equal: mean 0.2, variance (12 - 40 * 0.04) / 39 = 0.266667.
    found = pair([0] * 10 + [1] * 30, [1] * 10 + [0] * 2 + [1] * 28)
    assert found.means == (0.75, 0.95)
    assert found.difference == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.2 - 1.959964 * 0.0816497, 0.2 + 1.959964 * 0.0816497), abs=1e-6)
    assert found.is_shown
    assert found.p_value is None
    assert found.needed() == 53  # (2.801585 / 0.2)^2 * 0.266667 = 52.3
    assert found.needed(0.1) == 210
    assert found.needed(2.0) == 6  # 0.5 by the formula, but five equal signs have p = 2 / 2^5 = 0.0625


def test_a_difference_of_few_prompts_must_also_pass_the_exact_test():
    assert pair([0] * 5, [1] * 5).interval == (1.0, 1.0)
    assert pair([0] * 5, [1] * 5).p_value == 1 / 16
    assert not pair([0] * 5, [1] * 5).is_shown
    assert pair([0] * 6, [1] * 6).is_shown  # 1 / 32
    assert pair([0], [1]).interval is None
    assert not pair([0], [1]).is_shown


def test_samples_of_a_prompt_count_as_one_value(tmp_path):
    a = read_outputs(str(write_output(tmp_path / "a", {"m": [[0, 0, 1, 1], [1, 1, 1, 1]]})))[0]
    b = read_outputs(str(write_output(tmp_path / "b", {"n": [[1, 1, 1, 1], [1, 1, 1, 0]]})))[0]
    found = compared(a, b, metric=None)
    assert found.metric == "accuracy"
    assert found.decisive.differences == [0.5, -0.25]
    assert found.metrics["pass@4"].means == (1.0, 1.0)
    assert [a.prompts[key].row for key in found.most_different(5)] == [1, 0]
    assert compared(a, b, metric="reward").metric == "reward"
    with pytest.raises(UsageError, match="--metric length: the outputs have accuracy, pass@4"):
        compared(a, b, metric="length")


def test_outputs_that_do_not_match_are_refused_with_the_way_out(tmp_path):
    scores = [[0.0], [1.0], [1.0]]
    a = read_outputs(str(write_output(tmp_path / "a", {"m": scores})))[0]
    hot = read_outputs(str(write_output(tmp_path / "hot", {"m": scores}, temperature=0.5)))[0]
    later = read_outputs(str(write_output(tmp_path / "later", {"m": scores}, first=2)))[0]
    far = read_outputs(str(write_output(tmp_path / "far", {"m": scores}, first=9)))[0]
    with pytest.raises(UsageError, match=r"differ in temperature \(1.0, 0.5\): .*--may_differ temperature"):
        compared(a, hot, metric=None)
    assert len(compared(a, hot, metric=None, may_differ=["temperature"]).keys) == 3
    with pytest.raises(UsageError, match="--may_differ heat: the settings of an evaluation are temperature and"):
        compared(a, hot, metric=None, may_differ=["heat"])
    with pytest.raises(UsageError, match="have 1 prompts in common, of 3 and 3: set --common"):
        compared(a, later, metric=None)
    assert compared(a, later, metric=None, common=True).decisive.differences == [-1.0]
    with pytest.raises(UsageError, match="have no prompt in common"):
        compared(a, far, metric=None, common=True)


def test_equal_prompts_are_paired_in_their_order(tmp_path):
    root = write_output(tmp_path / "a", {"m": [[0.0], [1.0]]})
    text = (root / "samples.jsonl").read_text().replace("sum 1", "sum 0").replace('"label": "1"', '"label": "0"')
    (root / "samples.jsonl").write_text(text)
    (output,) = read_outputs(str(root))
    assert [prompt.values["accuracy"] for prompt in output.prompts.values()] == [0.0, 1.0]


def test_an_output_is_named_by_folder_file_and_model(tmp_path):
    root = write_output(tmp_path / "both", {"m": [[0.0]], "org/n:2": [[1.0]]})
    assert [one.pretrain for one in read_outputs(str(root))] == ["m", "org/n:2"]
    assert [one.pretrain for one in read_outputs(f"{root / 'eval.json'}:org/n:2")] == ["org/n:2"]
    with pytest.raises(UsageError, match="contains no model k, but m and org/n:2"):
        read_outputs(f"{root}:k")
    assert output_folder(str(tmp_path)) is None
    (root / "eval.json").unlink()
    with pytest.raises(UsageError, match="incomplete: resume its rlhf eval with --load_checkpoint"):
        read_outputs(str(root))


def test_two_models_of_one_output_are_compared_as_text(tmp_path, capsys):
    rows = [{"prompt": f"sum {number}", "level": "easy" if number % 2 else "hard"} for number in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = [[0.0]] * 10 + [[1.0]] * 30, [[1.0]] * 10 + [[0.0]] * 2 + [[1.0]] * 28
    root = write_output(tmp_path / "both", {"m": first, "n": second})
    run_compare(settings(root, by="level", print_samples=2, detect=0.1))
    lines = capsys.readouterr().out.splitlines()
    assert "40 prompts with 1 sample each" in lines
    assert "accuracy: B is higher by 20.0 pp (95 % interval +4.0 to +36.0 pp)" in lines
    assert "To see a difference of 10.0 pp with 80 % power: 210 prompts" in lines
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ") and len(line.split()) > 4}
    assert table["accuracy"] == ["40", "75.0%", "95.0%", "+20.0", "+4.0", "to", "+36.0", "pp"]
    assert table["easy"][:4] == table["hard"][:4] == ["20", "75.0%", "95.0%", "+20.0"]
    assert f"  {tmp_path / 'sums.jsonl'} row 10, label '10': 'sum 10'" in lines
    assert "    A 100.0%: 'm says 1.0'" in lines
    run_compare(settings(root, json=True, by="source"))
    found = json.loads(capsys.readouterr().out)
    assert (found["metrics"]["accuracy"]["difference"], found["is_shown"]) == (pytest.approx(0.2), True)
    assert found["prompts_needed"] == 53
    assert list(found["by"]) == [str(tmp_path / "sums.jsonl")]
    with pytest.raises(UsageError, match=r"--by size: .*line 1 has no such column, but source, data_source,"):
        run_compare(settings(root, by="size"))


def test_equal_outputs_show_no_difference(tmp_path, capsys):
    root = write_output(tmp_path / "a", {"m": [[0.0], [1.0]]})
    run_compare(settings(root, f"{root}:m"))
    printed = capsys.readouterr().out
    assert "accuracy: no difference shown (all prompts have equal values)" in printed
    assert "largest differences" not in printed


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"models": ["a", "b", "c"]}, "3 models are given: compare two, as in rlhf compare A B"),
        ({"models": ["a", "b"], "bisect": True}, "bisect requires one run directory, not 2"),
    ],
)
def test_numbers_of_models_that_cannot_be_compared_are_refused(values, complaint):
    with pytest.raises(UsageError, match=complaint):
        build_config(CompareConfig, values)


def test_a_model_is_evaluated_with_the_settings_of_the_output(tmp_path, monkeypatch):
    root = write_output(tmp_path / "a", {"m": [[0.0], [1.0]]}, max_new_tokens=77)
    runs: list[EvalConfig] = []

    def evaluate(config: EvalConfig) -> None:
        runs.append(config)
        write_output(Path(str(config.out.output)), {config.model.pretrain: [[1.0], [1.0]]})

    class Model:
        def fingerprint(self) -> str:
            return "f"

    monkeypatch.setattr(compare, "run_evaluation", evaluate)
    monkeypatch.setattr(compare, "check_early", lambda config: None)
    monkeypatch.setattr(compare, "find_inference_model", lambda source: Model())
    run_compare(settings(root, "org/other", output=str(tmp_path / "kept"), vllm_num_engines=3))
    (config,) = runs
    assert (config.model.pretrain, config.sampling.max_new_tokens, config.sampling.temperature) == (
        "org/other",
        77,
        1.0,
    )
    assert (config.engine.vllm_num_engines, config.reward.reward_funcs) == (3, ["gsm8k"])
    assert config.out.load_checkpoint
    assert Path(str(config.out.output)).parent == tmp_path / "kept"
    run_compare(settings(root, "org/other", output=str(tmp_path / "kept"), vllm_num_engines=3, overwrite=True))
    assert runs[1].out.output == config.out.output
    assert runs[1].out.overwrite
    run_compare(settings(root, "org/other", output=str(tmp_path / "kept"), temperature="0", may_differ="temperature"))
    # A given flag replaces the adopted setting, also with the default of the command.
    assert runs[2].sampling.temperature == 0.0
    with pytest.raises(UsageError, match="org/m has no evaluation: set --prompt_data and a reward, as in rlhf eval"):
        run_compare(settings("org/m", "org/n"))


@pytest.mark.parametrize("size", [2, 3, 8, 9])
def test_the_first_broken_point_is_found_wherever_it_is(size):
    for first in range(1, size):
        for hints in ([], [first, first - 1], [1, 0]):
            tried: set[int] = set()

            def is_broken(at: int, first: int = first, tried: set[int] = tried) -> bool:
                tried.add(at)
                return at >= first

            assert first_true(0, size - 1, is_broken, hints) == first
            assert len(tried) <= (2 if hints[:1] == [first] else 5)


def run_of(logged: Sequence[float | None]) -> RecordedRun:
    points = [
        Point(10 * (at + 1), Path(f"step_{at}"), {} if value is None else {"accuracy": value})
        for at, value in enumerate(logged)
    ]
    return RecordedRun("grpo", {}, points)


def bisected_scores(run: RecordedRun, right: Sequence[int], root: Path) -> tuple[Bisection, list[int]]:
    """Bisect a run whose points answer `right` of 40 prompts correctly. Returns the evaluated steps, too."""
    evaluated: list[int] = []

    def evaluate(point: Point) -> EvalOutput:
        evaluated.append(point.step)
        number = right[run.points.index(point)]
        scores = [[float(at < number)] for at in range(40)]
        return read_outputs(str(write_output(root / f"step_{point.step}", {"m": scores})))[0]

    return bisected(run, evaluate, metric=None), evaluated


def test_a_run_is_searched_for_the_checkpoint_where_it_broke(tmp_path):
    found, evaluated = bisected_scores(run_of([None] * 9), [30] * 5 + [5] * 4, tmp_path)
    assert found.broken == found.points[5]
    assert not found.is_best
    assert evaluated == [10, 90, 50, 70, 60]
    assert found.paired(found.points[5]).difference == pytest.approx(-25 / 40)
    assert found.as_dict()["broken"] == 60


def test_logged_metrics_choose_the_reference_and_the_first_checkpoints(tmp_path):
    logged = [0.5, 0.7, 0.8, 0.79, 0.78, 0.77, 0.1, 0.1, 0.1]
    found, evaluated = bisected_scores(run_of(logged), [20, 28, 32, 32, 31, 31, 4, 4, 4], tmp_path)
    assert (found.reference.step, found.is_best) == (30, True)
    assert evaluated == [30, 90, 70, 60]
    assert found.broken == found.points[6]


def test_a_run_that_did_not_break_says_so(tmp_path):
    found, evaluated = bisected_scores(run_of([None] * 5), [20, 20, 20, 20, 21], tmp_path)
    assert found.broken is None
    assert evaluated == [10, 50]
    better, _ = bisected_scores(run_of([None] * 5), [5, 20, 20, 20, 30], tmp_path / "better")
    assert better.broken is None


def test_a_run_directory_has_points_and_settings_of_its_evaluation(tmp_path):
    (tmp_path / "run.json").write_text('{"command": "grpo"}')
    values = {
        "prompt_data": "train.jsonl",
        "eval_dataset": "test.jsonl",
        "eval_temperature": 0.6,
        "temperature": 1.0,
        "max_new_tokens": 9,
        "prompt_data_probs": "0.5,0.5",
    }
    (tmp_path / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    lines = [{"step": step, "eval/accuracy": step / 10, "loss": 1} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="has 0 checkpoints, but --bisect requires two: save more with --save_steps"):
        recorded_run(tmp_path)
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        for engine in ("actor", "critic"):
            (folder / engine / "deepspeed").mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = recorded_run(tmp_path)
    assert [(point.step, point.path.name, point.logged) for point in run.points] == [
        (1, "actor", {"accuracy": 0.1}),
        (2, "actor", {"accuracy": 0.2}),
        (3, "model", {"accuracy": 0.3}),
    ]
    assert run.evaluation_settings() == {"prompt_data": "test.jsonl", "temperature": 0.6, "max_new_tokens": 9}
    # The run broke in its first iteration: only the initial model was right.
    with (tmp_path / "metrics.jsonl").open("a") as metrics, (tmp_path / "config.yaml").open("a") as settings:
        metrics.write(json.dumps({"step": 0, "eval/accuracy": 0.9}) + "\n")
        settings.write("pretrain: models/model\n")
    run = recorded_run(tmp_path)
    assert run.points[0] == Point(0, Path("models/model"), {"accuracy": 0.9})
    found, _ = bisected_scores(run, [36, 4, 4, 4], tmp_path / "outputs")
    assert (found.reference.name, found.broken) == ("initial model", run.points[1])
    assert [point.step for point in run.without_logged().points] == [1, 2, 3]
