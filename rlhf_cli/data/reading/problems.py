"""reasoning-gym datasets by name and parameters. Runs in processes of its own, because the package takes seconds to
import: one that writes the problems of a dataset, and reward workers.
"""

import dataclasses
import json
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Protocol

from rlhf_cli.config.procedural import BAD_NAME, REWARD
from rlhf_cli.config.queries import parameters_of
from rlhf_cli.errors import UsageError, one_line

_SEED = 0
"""Seed of a dataset without one, which the package would draw at random."""
_MIXTURE = "composite"
"""The package's mixture of datasets."""
_MOST_NAMES, _LEAST_LIKENESS = 5, 0.5
"""Similar names in a message: their number, and the least similarity."""


class Dataset(Protocol):
    """What is used of the package's datasets."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, object]: ...
    def score_answer(self, answer: str, entry: dict[str, object]) -> float:
        """Return a score from 0 to 1."""
        ...


@cache
def dataset_of(text: str) -> Dataset:
    """Return the dataset `NAME?PARAMETER=VALUE&...`. A parameter that is given several times is a list.

    Raises:
        UsageError: there is no such dataset or parameter, or the dataset rejects a value.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    name, _, query = text.partition("?")
    if name == _MIXTURE:
        raise UsageError("separate several datasets with commas, and mix them with --prompt_data_probs")
    if name not in DATASETS:
        names = sorted(DATASETS.keys() - {_MIXTURE})
        near = get_close_matches(name.lower(), names, n=_MOST_NAMES, cutoff=_LEAST_LIKENESS)
        listed = f"did you mean {' or '.join(near)}?" if near else f"the datasets are {', '.join(names)}"
        raise UsageError(f"reasoning_gym has no dataset {name!r}: {listed}")
    # The package's own seed is none, from which the type of a value would not follow.
    defaults = {field.name: _default(field) for field in dataclasses.fields(DATASETS[name][1])} | {"seed": _SEED}
    try:
        return create_dataset(name, **{"seed": _SEED, **parameters_of(name, query, defaults)})
    # Datasets check their values with assertions.
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def row_of(text: str, dataset: Dataset, index: int) -> dict[str, object]:
    """Return problem number `index` as a row.

    The label names the problem, so that a reward worker can generate it again: the package scores an answer with the
    full entry, which JSON cannot hold. `demonstration` is the shortest response with the right answer, for `rlhf sft`.
    """
    entry = dataset[index]
    answer = entry["answer"]
    row = {
        "question": entry["question"],
        "answer": answer,
        "label": {REWARD: text, "row": index, "expected": answer},
        "data_source": f"{REWARD}/{text.partition('?')[0]}",
        "metadata": json.loads(json.dumps(entry["metadata"], default=str, skipkeys=True)),
    }
    return row if answer is None else row | {"demonstration": f"<answer>{answer}</answer>"}


def main(text: str, path: str, count: str) -> int:
    """Write the problems of a dataset to a file, or the first `count`. Prints the error if there is one."""
    try:
        dataset = dataset_of(text)
    except UsageError as error:
        print(error)
        return BAD_NAME
    number = len(dataset) if not count else min(int(count), len(dataset))
    with Path(path).open("w", encoding="utf-8") as file:
        for index in range(number):
            file.write(json.dumps(row_of(text, dataset, index), ensure_ascii=False) + "\n")
    return 0
