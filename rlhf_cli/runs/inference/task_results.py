"""Reads what lm-evaluation-harness and Inspect write: metrics with standard errors, and a row per response.

The rows have the keys of samples.jsonl, so that `rlhf compare` and `rlhf view` read them. Of several metrics or filters
of a task, the first one is the row's reward.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RunError

Row = dict[str, Any]
_INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Inspect's grades: correct, partial, incorrect, no answer."""
_INSPECT_STOPS = {"max_tokens": "length", "model_length": "length", "stop": "stop"}


@dataclass(frozen=True)
class TaskMetric:
    """One metric of a task over its prompts. `stderr` is the standard error of the mean, None if there is none."""

    task: str
    name: str
    value: float
    stderr: float | None
    num_prompts: int


@dataclass(frozen=True)
class TaskResults:
    """Results of one model: all metrics, and rows in task order, with the samples of a prompt adjacent."""

    metrics: list[TaskMetric]
    rows: list[Row]


def read_lm_eval(folder: Path, count: Callable[[str], int]) -> TaskResults:
    """Read the output of `lm_eval run --log_samples`. `count` returns the number of tokens in a response.

    Raises:
        RunError: the folder has no results.
    """
    found = sorted(folder.rglob("results_*.json"))
    if not found:
        raise RunError(f"lm_eval has written no results to {folder}")
    written = json.loads(found[-1].read_text(encoding="utf-8"))
    metrics: list[TaskMetric] = []
    rows: list[Row] = []
    # Groups of tasks, such as mmlu, have metrics without samples of their own.
    for task, values in {**written["results"], **written.get("groups", {})}.items():
        number = written["n-samples"].get(task, {}).get("effective", values.get("sample_len", 0))
        metrics += _lm_eval_metrics(task, values, number)
        files = sorted(folder.rglob(f"samples_{task}_2*.jsonl"))
        if files:
            lines = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines() if line]
            rows += _rows(task, list(_lm_eval_samples(lines, count)))
    return TaskResults(metrics, rows)


def _lm_eval_metrics(task: str, values: Mapping[str, Any], number: int) -> Iterator[TaskMetric]:
    """Yield metrics from keys such as `exact_match,strict-match` and `exact_match_stderr,strict-match`."""
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = values.get(f"{name}_stderr,{kind}")
        named = name if kind == "none" else f"{name} ({kind})"
        yield TaskMetric(task, named, float(value), stderr if isinstance(stderr, float) else None, number)


def _lm_eval_samples(lines: Sequence[Row], count: Callable[[str], int]) -> Iterator[Row]:
    for line in lines:
        # Each filter has lines of its own for the same document.
        if line["filter"] != lines[0]["filter"]:
            continue
        arguments = list(line["arguments"].values())
        response = _lm_eval_response(line, arguments)
        yield {
            "row": line["doc_id"],
            "prompt": arguments[0]["arg_0"],
            "response": response,
            "label": str(line["target"]),
            "reward": _number(line[lines[0]["metrics"][0]]),
            "detail": line["metrics"][0],
            "length": count(response),
            # lm_eval does not record why a response ended.
            "finish_reason": None,
        }


def _lm_eval_response(line: Row, arguments: Sequence[Row]) -> str:
    """Return the first sampled text; for multiple choice, the choice with the highest log-prob."""
    first = line["resps"][0][0]
    if isinstance(first, str):
        return first
    log_probs = [float(choice[0][0]) if isinstance(choice[0], list) else float(choice[0]) for choice in line["resps"]]
    best = max(range(len(log_probs)), key=log_probs.__getitem__)
    return str(arguments[best].get("arg_1", ""))


def read_inspect(folder: Path, count: Callable[[str], int]) -> TaskResults:
    """Read the JSON logs of `inspect eval`. `count` returns the number of tokens in a response.

    Raises:
        RunError: the folder has no log, or a task did not finish.
    """
    metrics: list[TaskMetric] = []
    rows: list[Row] = []
    logs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    if not logs:
        raise RunError(f"inspect has written no log to {folder}")
    for log in logs:
        task = log["eval"]["task"]
        if log["status"] != "success":
            reason = (log.get("error") or {}).get("message", log["status"])
            raise RunError(f"inspect's task {task} did not finish: {reason}")
        metrics += _inspect_metrics(task, log["results"])
        samples = log.get("samples") or []
        places = {name: place for place, name in enumerate(dict.fromkeys(sample["id"] for sample in samples))}
        # Epochs repeat all prompts; here, the samples of a prompt are adjacent.
        ordered = sorted(samples, key=lambda sample: (places[sample["id"]], sample["epoch"]))
        rows += _rows(task, [{"row": places[sample["id"]], **_inspect_row(sample, count)} for sample in ordered])
    return TaskResults(metrics, rows)


def _inspect_metrics(task: str, results: Mapping[str, Any]) -> Iterator[TaskMetric]:
    for score in results["scores"]:
        values = {name: entry["value"] for name, entry in score["metrics"].items()}
        stderr = values.pop("stderr", None)
        for name, value in values.items():
            # The error is that of the mean, which is the first metric.
            own = stderr if name == next(iter(values)) else None
            yield TaskMetric(task, f"{score['name']} {name}", float(value), own, results["total_samples"])


def _inspect_row(sample: Row, count: Callable[[str], int]) -> Row:
    response = sample["output"]["completion"]
    scorer, score = next(iter((sample.get("scores") or {"": {"value": None}}).items()))
    choices = sample["output"].get("choices") or [{}]
    target = sample["target"]
    tokens = (sample["output"].get("usage") or {}).get("output_tokens")
    return {
        "sample": sample["epoch"] - 1,
        "prompt": _inspect_prompt(sample["input"]),
        "response": response,
        "label": target if isinstance(target, str) else ", ".join(target),
        "reward": _number(score["value"]),
        "detail": scorer,
        "length": count(response) if tokens is None else tokens,
        "finish_reason": _INSPECT_STOPS.get(choices[0].get("stop_reason", "")),
    }


def _inspect_prompt(given: str | list[Row]) -> str | list[Row]:
    """Return the input: a text, or messages with role and content."""
    if isinstance(given, str):
        return given
    return [{"role": message["role"], "content": message["content"]} for message in given]


def _number(value: object) -> float | None:
    """Return a score as a number; None if it is not one."""
    if isinstance(value, str):
        return _INSPECT_VALUES.get(value)
    return float(value) if isinstance(value, int | float) else None


def _rows(task: str, samples: list[Row]) -> list[Row]:
    """Return complete rows; [] if the first metric is not a number for each prompt, as for corpus metrics."""
    rewards = [sample["reward"] for sample in samples]
    if None in rewards:
        return []
    # Only a metric of 0 and 1 says which responses are correct.
    verdicts = {1.0: "correct", 0.0: "wrong"} if set(rewards) <= {0.0, 1.0} else {}
    return [
        {
            "source": task,
            "sample": 0,
            "weight_version": 0,
            "verdict": verdicts.get(sample["reward"], "scored"),
            "answer": None,
            **sample,
        }
        for sample in samples
    ]
