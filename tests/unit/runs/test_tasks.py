"""`rlhf eval --tasks`: settings, what the packages write, and outputs that `rlhf compare` reads.

The written files are those of lm-eval 0.4.13 and inspect-ai 0.3.285, shortened.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.early_checks import check_early
from rlhf_cli.runs.inference.output_folder import prepare_folder
from rlhf_cli.runs.inference.outputs import read_outputs
from rlhf_cli.runs.inference.paired import compared
from rlhf_cli.runs.inference.task_results import TaskMetric, read_inspect, read_lm_eval
from rlhf_cli.runs.inference.tasks import _identity, _write, metrics_table


def config(**settings: Any) -> EvalConfig:
    return build_config(EvalConfig, {"pretrain": "m", "tasks": "lm_eval:sums,choice", **settings})


def lm_eval_sample(number: int, *, filter_: str = "none", **metrics: float) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"prompt": f"{number}+1="},
        "target": str(number + 1),
        "arguments": {"gen_args_0": {"arg_0": f"{number}+1=", "arg_1": {"until": ["\n"]}}},
        "resps": [[f"It is {number}."]],
        "filtered_resps": [str(number)],
        "filter": filter_,
        "metrics": list(metrics),
        **metrics,
    }


def choice_sample(number: int, log_probs: tuple[float, float], **metrics: float) -> dict[str, Any]:
    return {
        **lm_eval_sample(number),
        **metrics,
        "metrics": list(metrics),
        "arguments": {
            f"gen_args_{n}": {"arg_0": f"Is {number} even?", "arg_1": text} for n, text in enumerate((" yes", " no"))
        },
        "resps": [[[str(log_prob), "False"]] for log_prob in log_probs],
    }


def write_lm_eval(folder: Path, *, right: float = 1.0) -> Path:
    """Write results of two tasks: sums with two filters, and a multiple choice with two metrics."""
    folder.mkdir(parents=True)
    results = {
        "sums": {
            "alias": "sums",
            "exact_match,strict": 0.5,
            "exact_match_stderr,strict": 0.25,
            "exact_match,flexible": 1.0,
            "exact_match_stderr,flexible": 0.0,
        },
        "choice": {"acc,none": 0.5, "acc_stderr,none": "N/A", "acc_norm,none": 0.25, "acc_norm_stderr,none": 0.1},
    }
    written = {
        "results": results,
        "groups": {"both": {"acc,none": 0.5, "acc_stderr,none": 0.2}},
        "n-samples": {"sums": {"original": 9, "effective": 2}, "choice": {"original": 2, "effective": 2}},
    }
    (folder / "results_2026-11-29T16-08-26.json").write_text(json.dumps(written))
    sums = [lm_eval_sample(n, filter_="strict", exact_match=value) for n, value in enumerate([0.0, right])]
    sums += [lm_eval_sample(n, filter_="flexible", exact_match=1.0) for n in range(2)]
    choices = [
        choice_sample(0, (-2.5, -1.5), acc=0.0, acc_norm=1.0),
        choice_sample(1, (-1.0, -1.5), acc=1.0, acc_norm=0.0),
    ]
    for name, rows in (("sums", sums), ("choice", choices)):
        file = folder / f"samples_{name}_2026-11-29T16-08-26.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_inspect(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)

    def sample(name: str, epoch: int, grade: str, stop: str) -> dict[str, Any]:
        output = {"completion": f"A{epoch}", "choices": [{"stop_reason": stop}], "usage": {"output_tokens": 7}}
        given = [{"role": "user", "content": f"What is {name}?", "id": "x"}]
        scores = {"match": {"value": grade}}
        return {"id": name, "epoch": epoch, "input": given, "target": ["1", "2"], "output": output, "scores": scores}

    metrics = {name: {"name": name, "value": value} for name, value in {"accuracy": 0.5, "stderr": 0.25}.items()}
    log = {
        "status": "success",
        "eval": {"task": "sums"},
        "results": {"total_samples": 2, "scores": [{"name": "match", "metrics": metrics}]},
        "samples": [
            sample("b", 1, "C", "stop"),
            sample("a", 1, "I", "max_tokens"),
            sample("b", 2, "I", "stop"),
            sample("a", 2, "C", "stop"),
        ],
        **changes,
    }
    (folder / "log.json").write_text(json.dumps(log))
    return folder


def test_metrics_of_lm_eval_have_their_filter_and_standard_error(tmp_path) -> None:
    assert read_lm_eval(write_lm_eval(tmp_path / "m" / "out"), len).metrics == [
        TaskMetric("sums", "exact_match (strict)", 0.5, 0.25, 2),
        TaskMetric("sums", "exact_match (flexible)", 1.0, 0.0, 2),
        TaskMetric("choice", "acc", 0.5, None, 2),
        TaskMetric("choice", "acc_norm", 0.25, 0.1, 2),
        TaskMetric("both", "acc", 0.5, 0.2, 0),
    ]


def test_the_first_metric_of_the_first_filter_scores_the_responses(tmp_path) -> None:
    rows = read_lm_eval(write_lm_eval(tmp_path / "out"), len).rows
    read = [(row["source"], row["row"], row["prompt"], row["response"], row["label"], row["verdict"]) for row in rows]
    assert read == [
        ("sums", 0, "0+1=", "It is 0.", "1", "wrong"),
        ("sums", 1, "1+1=", "It is 1.", "2", "correct"),
        # The choice with the higher log-prob.
        ("choice", 0, "Is 0 even?", " no", "1", "wrong"),
        ("choice", 1, "Is 1 even?", " yes", "2", "correct"),
    ]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    assert rows[0]["length"] == len("It is 0.")


def test_partial_scores_are_no_verdicts(tmp_path) -> None:
    rows = read_lm_eval(write_lm_eval(tmp_path / "out", right=0.5), len).rows
    assert [row["verdict"] for row in rows] == ["scored", "scored", "wrong", "correct"]


def test_epochs_of_inspect_are_samples_of_one_prompt(tmp_path) -> None:
    found = read_inspect(write_inspect(tmp_path / "logs"), len)
    assert found.metrics == [TaskMetric("sums", "match accuracy", 0.5, 0.25, 2)]
    read = [(row["row"], row["sample"], row["reward"], row["verdict"], row["finish_reason"]) for row in found.rows]
    assert read == [
        (0, 0, 1.0, "correct", "stop"),
        (0, 1, 0.0, "wrong", "stop"),
        (1, 0, 0.0, "wrong", "length"),
        (1, 1, 1.0, "correct", "stop"),
    ]
    assert found.rows[0]["prompt"] == [{"role": "user", "content": "What is b?"}]
    assert (found.rows[0]["length"], found.rows[0]["label"]) == (7, "1, 2")


def test_tasks_that_did_not_finish_fail(tmp_path) -> None:
    with pytest.raises(RunError, match="inspect's task sums did not finish: no sandbox"):
        read_inspect(write_inspect(tmp_path / "logs", status="error", error={"message": "no sandbox"}), len)
    with pytest.raises(RunError, match="no results"):
        read_lm_eval(tmp_path / "empty", len)


def test_compare_pairs_the_prompts_of_two_outputs(tmp_path) -> None:
    outputs = []
    for name, right in (("a", 0.0), ("b", 1.0)):
        settings, root = config(pretrain=name), tmp_path / name
        root.mkdir()
        prepare_folder(root, to_yaml(settings), _identity(settings, {}), keep=False)
        _write(settings, root, {name: read_lm_eval(write_lm_eval(root / "lm_eval", right=right), len)})
        outputs += read_outputs(str(root))
    found = compared(*outputs, metric=None)
    assert found.metric == "accuracy"
    # sums: 0 and 0, then 0 and 1; choice: 0 and 1 for both.
    assert found.decisive.means == (0.25, 0.5)
    assert {name: pair.difference for name, pair in found.categories("source").items()} == {"choice": 0.0, "sums": 0.5}
    written = json.loads((tmp_path / "b" / "eval.json").read_text())["results"][0]
    named = {"pretrain": "b", "task": "sums", "name": "exact_match (strict)"}
    assert written == {**named, "value": 0.5, "stderr": 0.25, "num_prompts": 2}


def test_the_table_has_a_row_per_metric(tmp_path) -> None:
    table = metrics_table({"m": read_lm_eval(write_lm_eval(tmp_path / "out"), len).metrics})
    assert table.row_count == 5
    assert list(table.columns[5].cells) == ["0.2500", "0.0000", "", "0.1000", "0.2000"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tasks": "gsm8k"}, r"tasks 'gsm8k': must be lm_eval:TASK,... or inspect:FILE.py"),
        ({"tasks": "lm_eval:"}, "must be lm_eval:TASK"),
        ({"tasks_args": "--model hf"}, "this program sets --model; remove it"),
        ({"tasks_args": "'--limit"}, "No closing quotation"),
        ({"temperature": 1.0}, "temperature has no effect on tasks, which lm_eval samples and scores"),
        ({"vllm_num_engines": 2}, "vllm_num_engines has no effect on tasks"),
        ({"load_checkpoint": True, "output": "x"}, "load_checkpoint has no effect on tasks"),
        ({"prompt_data": "x.jsonl"}, "prompt_data has no effect on tasks"),
        ({"reward_funcs": "gsm8k"}, "reward_funcs has no effect on tasks"),
        ({"tasks": None, "reward_funcs": "gsm8k"}, "no prompts: set --prompt_data, or --tasks"),
        ({"tasks": None, "prompt_data": "x", "reward_funcs": "gsm8k", "tasks_args": "-x"}, "tasks_args needs --tasks"),
    ],
)
def test_settings_without_effect_are_refused(settings, complaint) -> None:
    with pytest.raises(UsageError, match=complaint):
        config(**settings)


def test_names_and_arguments_are_split() -> None:
    benchmark = config(tasks="inspect:a.py, b.py", tasks_args="--limit 10 -T 'name=a b'", max_len=99, seed=7).benchmark
    assert (benchmark.harness, benchmark.names) == ("inspect", ["a.py", "b.py"])
    assert benchmark.words == ["--limit", "10", "-T", "name=a b"]


def test_a_missing_package_is_reported_early(monkeypatch) -> None:
    monkeypatch.setattr("rlhf_cli.runs.early_checks.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"lm_eval is not installed: pip install 'rlhf-cli\[evals\]'"):
        check_early(config())


def test_a_missing_file_of_inspect_is_reported_early(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("rlhf_cli.runs.early_checks.find_spec", lambda name: True)
    (tmp_path / "a.py").touch()
    with pytest.raises(UsageError, match=r"b\.py does not exist"):
        check_early(config(tasks=f"inspect:{tmp_path}/a.py@one,{tmp_path}/b.py"))
