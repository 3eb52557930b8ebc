"""Compares two runs bit for bit: metrics, samples and model."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_cli.models.weight_files import SafetensorsFiles
from rlhf_cli.tracking.figures import is_measured, title
from rlhf_cli.tracking.sinks import EVAL_SAMPLES_FILE, SAMPLES_FILE, read_metrics, read_samples

_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs. `what` names metrics with values, or a sample with the keys that differ."""

    step: int
    what: str


class MetricsComparison:
    """Compares a finished run's metrics with those of a run in progress."""

    def __init__(self, old: Path, new: Path, *, until: float) -> None:
        self._old = {step: values for step, values in read_metrics(old).items() if step <= until}
        self._new = new
        self.num_steps = 0
        self.num_values = 0

    def first_difference(self, *, before: float = math.inf) -> Difference | None:
        """Return the first difference in steps below `before` that have not been compared, or None."""
        new = read_metrics(self._new)
        for step in itertools.islice(self._old, self.num_steps, None):
            if step >= before:
                return None
            old_values, new_values = _reproducible(self._old[step]), _reproducible(new.get(step, {}))
            names = [name for name in old_values | new_values if not _equal(old_values, new_values, name)]
            if names:
                return Difference(step, _listed(names, old_values, new_values))
            self.num_steps += 1
            self.num_values += len(old_values)
        return None


def _reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not is_measured(name)}


def _equal(old: Mapping[str, float], new: Mapping[str, float], name: str) -> bool:
    """Return whether a metric has the same bits; NaN equals NaN."""
    first, second = old.get(name), new.get(name)
    return first == second or (first is not None and second is not None and first != first and second != second)


def _listed(names: list[str], old: Mapping[str, float], new: Mapping[str, float]) -> str:
    """Return the first names with both values, in full precision, because they may differ in the last digit only."""
    shown = [f"{title(name)} {old.get(name, 'missing')!s} -> {new.get(name, 'missing')!s}" for name in names[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} other metrics" if len(names) > _SHOWN else "")


def first_sample_difference(old: Path, new: Path, *, until: float) -> tuple[int, Difference | None]:
    """Return the number of equal samples up to a step, and the first difference in them. Reads both files at once."""
    count = 0
    for file in (SAMPLES_FILE, EVAL_SAMPLES_FILE):
        for first, second in itertools.zip_longest(_rows(old / file, until), _rows(new / file, until)):
            if first != second:
                return count, _of_rows(first or {}, second or {})
            count += 1
    return count, None


def _rows(path: Path, until: float) -> Iterator[dict[str, object]]:
    return (row for row in read_samples(path) if row["step"] <= until)


def _of_rows(first: Mapping[str, object], second: Mapping[str, object]) -> Difference:
    row = first or second
    step = int(str(row["step"]))
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    which = f"sample {row['id']}" if "id" in row else "a sample"
    if not first or not second:
        return Difference(step, f"{which} is missing in the {'run' if not first else 'repetition'}")
    return Difference(step, f"{which} differs in {', '.join(keys)}")


def model_difference(old: Path, new: Path) -> str | None:
    """Return a phrase about the first tensor that differs between two model folders, None if all bits are equal."""
    first, second = (SafetensorsFiles(sorted(folder.glob("*.safetensors"))) for folder in (old, new))
    for name in sorted({*first.names(), *second.names()}):
        if name not in first.names() or name not in second.names():
            return f"tensor {name} exists in one model only"
        tensors = first.read(name), second.read(name)
        if not _same_bits(*tensors):
            return f"tensor {name} differs by up to {_largest(*tensors):g}"
    return None


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _largest(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.double() - second.double()).abs().max()) if first.shape == second.shape else math.inf
