"""Groups of scored responses that a checkpoint stores for later iterations.

One file holds surplus groups from `--dynamic_filtering`, the other holds completed `--async_train` batches.
"""

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.rollout import SampledGroups
from rlhf_cli.trainers.online.samples import Group, Sample
from rlhf_cli.trainers.online.state import LoopState

SURPLUS = "surplus.jsonl.gz"
AHEAD = "ahead.jsonl.gz"
_DTYPE = "array of"
"""Key by which a stored array differs from a row's objects."""


def save_groups(folder: Path, state: LoopState) -> None:
    """Write the loop's groups to a checkpoint folder. `state.plain()` is the remaining state."""
    save_surplus(folder, state.source.surplus)
    _save_ahead(folder, state.ahead)


def check_state(checkpoint: Checkpoint) -> None:
    """Raise UsageError if the checkpoint has no prompt source state because an earlier version wrote it."""
    if "source" not in checkpoint.state["loop"]:
        raise UsageError(
            f"checkpoint {checkpoint.path} was written by an earlier version of rlhf, which stored the prompt order "
            "in a different format; use another --output, or --overwrite to start again"
        )


def load_state(checkpoint: Checkpoint, prompt_at: Callable[[int], Prompt]) -> LoopState:
    """Load the loop state from a checkpoint. `prompt_at` returns the prompt at a position in the run's prompt order."""
    return LoopState.of(
        checkpoint.state["loop"],
        surplus=load_surplus(checkpoint.path, prompt_at),
        ahead=load_ahead(checkpoint.path, prompt_at),
    )


def save_surplus(folder: Path, groups: Sequence[Group]) -> None:
    """Write groups to a checkpoint folder without rounding. Prompts and images are not stored."""
    _write(folder / SURPLUS, map(_plain, groups))


def load_surplus(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[Group]:
    """Load groups from a checkpoint. `prompt_at` returns the prompt at a position in the run's prompt order."""
    return [_group(row, prompt_at(row["place"])) for row in _read(folder / SURPLUS)]


def _save_ahead(folder: Path, batches: Sequence[SampledGroups]) -> None:
    """Write completed batches to a checkpoint folder, like `save_surplus`; no file if there are none."""
    if batches:
        _write(folder / AHEAD, map(_plain_batch, batches))


def load_ahead(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[SampledGroups]:
    """Load completed batches from a checkpoint, like `load_surplus`."""
    rows = _read(folder / AHEAD) if (folder / AHEAD).exists() else []
    return [_batch(row, prompt_at) for row in rows]


def _write(path: Path, rows: Iterable[object]) -> None:
    # Level 1: the files are written in every checkpoint, and higher levels cost more time than they save space.
    # JSON writes floats with all digits, so log-probs are restored exactly.
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        file.writelines(json.dumps(row, default=_array_object) + "\n" for row in rows)


def _read(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line, object_hook=_array_of) for line in file]


def _array_object(array: np.ndarray) -> dict[str, object]:
    """Return routed experts, the only arrays in groups, as a JSON object."""
    return {_DTYPE: str(array.dtype), "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}


def _array_of(plain: dict[str, Any]) -> Any:
    """Return the array encoded by `_array_object`, or any other object unchanged."""
    if _DTYPE not in plain:
        return plain
    return np.frombuffer(base64.b64decode(plain["base64"]), plain[_DTYPE]).reshape(plain["shape"])


def _plain_batch(batch: SampledGroups) -> dict[str, object]:
    groups = {name: [_plain(group) for group in getattr(batch, name)] for name in ("groups", "greedy", "filtered")}
    return groups | {"num_carried": batch.num_carried, "metrics": batch.metrics}


def _batch(row: Mapping[str, Any], prompt_at: Callable[[int], Prompt]) -> SampledGroups:
    groups, greedy, filtered = (
        [_group(one, prompt_at(one["place"]), is_greedy=name == "greedy") for one in row[name]]
        for name in ("groups", "greedy", "filtered")
    )
    return SampledGroups(groups, greedy, filtered, row["num_carried"], row["metrics"])


def _plain(group: Group) -> dict[str, object]:
    return {
        "place": group[0].group,
        "generations": [_plain_response(sample.response) for sample in group],
        "texts": [sample.text for sample in group],
        "scores": [asdict(sample.score) for sample in group],
    }


def _plain_response(response: Generation) -> dict[str, object]:
    arrays = {"token_ids": list(response.token_ids), "logprobs": list(response.logprobs)}
    # The samples' texts are stored once.
    return asdict(replace(response, text=None, **arrays))  # type: ignore[arg-type]


def _group(row: Mapping[str, Any], prompt: Prompt, *, is_greedy: bool = False) -> Group:
    # Checkpoints of earlier versions hold the requests to the rewards, with the texts in them.
    texts = row["texts"] if "texts" in row else [request["response"] for request in row["score_requests"]]
    columns = zip(row["generations"], texts, row["scores"], strict=True)
    return [
        Sample(prompt, row["place"], None if is_greedy else index, _generation(plain), text, Score(**score))
        for index, (plain, text, score) in enumerate(columns)
    ]


def _generation(plain: Mapping[str, Any]) -> Generation:
    # Checkpoints of earlier versions have no such key for single turns.
    episode = None if plain.get("episode") is None else Episode.of(plain["episode"])
    runs = tuple((version, count) for version, count in plain.get("version_runs", ()))
    return Generation(**{**plain, "episode": episode, "version_runs": runs})
