"""Reads `rlhf eval` outputs for comparisons: one value per prompt and metric."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_cli.errors import UsageError, listed
from rlhf_cli.rewards.evaluation import evaluate_answers
from rlhf_cli.runs.inference.evaluate import answer_of
from rlhf_cli.runs.inference.output_folder import FIGURES, IDENTITY
from rlhf_cli.runs.run_directory import recorded_settings
from rlhf_cli.tracking.sinks import SAMPLES_FILE, read_samples

Key = tuple[str, int]
"""Prompt digest, and occurrence among equal prompts, from 0."""
_OF_THE_MODEL = ("fingerprint of the weights", "fingerprint of the prompts", "number of prompts")
_NO_INFLUENCE = {"command", "pretrain", "rollout_batch_size", "rollout_backend", "enforce_eager", "prm_pretrain"}
"""Recorded facts that may differ: the model, and settings that change no score by design."""


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A prompt with one value per metric, over all samples: `{"accuracy": 0.75, "reward": 0.75, ...}`.

    `source` and `row` locate it in the data, `group` in samples.jsonl.
    """

    group: int
    source: str
    row: int
    data_source: str | None
    values: Mapping[str, float]


@dataclass(frozen=True)
class EvalOutput:
    """One evaluated model. `facts` are those that two outputs must have in common."""

    root: Path
    pretrain: str
    settings: Mapping[str, Any]
    facts: Mapping[str, object]
    prompts: Mapping[Key, EvaluatedPrompt]

    def rows(self, groups: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        """Return the samples.jsonl rows for these groups."""
        wanted, found = set(groups), dict[int, list[dict[str, Any]]]()
        for row in read_samples(self.root / SAMPLES_FILE):
            if row["group"] in wanted and row["pretrain"] == self.pretrain:
                found.setdefault(row["group"], []).append(row)
        return found


def output_folder(name: str) -> tuple[Path, str | None] | None:
    """Return an output folder, and a model name in it if given; None if `name` is no evaluation output.

    `name` is the folder, a file in it, or either with `:MODEL`.
    """
    places: list[tuple[str, str | None]] = [(name, None)]
    # A model's name may contain colons itself, so try each.
    places += [(name[:at], name[at + 1 :]) for at, character in enumerate(name) if character == ":"]
    for place, model in places:
        path = Path(place).expanduser()
        folder = path.parent if path.name in (FIGURES, SAMPLES_FILE) and path.is_file() else path
        if (folder / IDENTITY).is_file():
            return folder, model
    return None


def read_outputs(name: str) -> list[EvalOutput]:
    """Read the `rlhf eval` output that `name` names: one entry per model in it, or only the named model.

    Raises:
        UsageError: the output is incomplete, is from `rlhf generate`, or has no such model.
    """
    place = output_folder(name)
    assert place is not None, "checked by the caller"
    root, model = place
    identity = json.loads((root / IDENTITY).read_text(encoding="utf-8"))
    if identity["command"] != "eval":
        raise UsageError(f"{root} is an output of rlhf {identity['command']}: compare outputs of rlhf eval")
    if not (root / FIGURES).is_file():
        raise UsageError(f"{root} is incomplete: resume its rlhf eval with --load_checkpoint")
    settings = recorded_settings(root)
    # Without spaces, so that `--may_differ` can list them.
    facts = {fact.replace(" ", "_"): value for fact, value in identity.items() if not _may_differ(fact)}
    facts["pass_score"] = settings.get("pass_score")
    # Rows with the same model are adjacent, so the file is never loaded as a whole.
    by_model = groupby(read_samples(root / SAMPLES_FILE), key=lambda row: row["pretrain"])
    found = [
        EvalOutput(root, pretrain, settings, facts, _prompts(rows, settings))
        for pretrain, rows in by_model
        if model in (None, pretrain)
    ]
    if not found:
        names = listed(dict.fromkeys(row["pretrain"] for row in read_samples(root / SAMPLES_FILE)))
        raise UsageError(f"{root} contains no model {model}, but {names}")
    return found


def _may_differ(fact: str) -> bool:
    return fact in _NO_INFLUENCE or fact.startswith(_OF_THE_MODEL)


def _prompts(rows: Iterator[dict[str, Any]], settings: Mapping[str, Any]) -> dict[Key, EvaluatedPrompt]:
    prompts: dict[Key, EvaluatedPrompt] = {}
    seen: Counter[str] = Counter()
    samples = settings["n_samples_per_prompt"]
    ks = settings["k"] or ([samples] if samples > 1 else [])
    for group, found in groupby(rows, key=lambda row: row["group"]):
        of_prompt = list(found)
        first = of_prompt[0]
        content = json.dumps([first["prompt"], first["label"], first.get("tools")], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        evaluation = evaluate_answers(
            [[answer_of(row) for row in of_prompt]],
            ks=ks,
            pass_score=settings["pass_score"],
            aggregations=settings["prm_aggregation"],
        )
        values = {name: figure.value for name, figure in evaluation.figures.items()}
        prompts[digest, seen[digest]] = EvaluatedPrompt(
            group, first["source"], first["row"], first.get("data_source"), values
        )
        seen[digest] += 1
    return prompts
