"""Solutions with labeled steps for process reward models, as a kind of offline data. A PRM800K row may give several.

Steps are joined by `step_separator` and rendered as the assistant's turn. `max_len` truncates between steps. A step's
score is read at its last token: the one that completes the separator, or the end of turn for the last step.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rlhf_cli.config.data import StepDataConfig
from rlhf_cli.data.encoding import Encoded
from rlhf_cli.data.formats.choosing import step_formats
from rlhf_cli.data.formats.conversations import Conversation, Message, Solution
from rlhf_cli.data.loading import Kind
from rlhf_cli.data.pictures.storing import pictures_at, stored_pictures
from rlhf_cli.data.preparing import NUMBERS, DataReport, fitting
from rlhf_cli.data.reading.sources import Row
from rlhf_cli.data.solution_steps import joined_steps, step_ends
from rlhf_cli.data.store import StoredTable
from rlhf_cli.data.templates.rendering import Pieces
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.models.vision.pictures import PlacedPicture


@dataclass(frozen=True, slots=True)
class StepItem:
    """A prompt with a solution: token_ids int32 [L], with `start` prompt tokens.

    `ends` int32 [S] are the positions after each step's last token; `labels` float32 [S], NaN for steps without loss.
    `pictures` are in the prompt.
    """

    token_ids: np.ndarray
    ends: np.ndarray
    labels: np.ndarray
    start: int
    pictures: tuple[PlacedPicture, ...] = ()


def _item_at(table: StoredTable, row: int) -> StepItem:
    token_ids, ends, labels = (table.numbers(name, row) for name in ("token_ids", "ends", "labels"))
    return StepItem(token_ids, ends, labels, table.value("start", row), pictures_at(table, row))


def _conversation(solution: Solution, separator: str) -> Conversation:
    content, _ = joined_steps(solution.steps, separator)
    return Conversation((*solution.prompt, Message("assistant", content)))


def _marked(row: Row, solutions: list[Solution], texts: list[Pieces], config: StepDataConfig) -> list[Pieces]:
    pairs = zip(solutions, texts, strict=True)
    return [_with_steps(row, solution, pieces, config.separator) for solution, pieces in pairs]


def _with_steps(row: Row, solution: Solution, pieces: Pieces, separator: str) -> Pieces:
    """Replace the span of the assistant's last turn by one span per step."""
    content, ends = joined_steps(solution.steps, separator)
    response = pieces.texts[-1]
    if not response.spans:
        raise row.error("the solution is empty")
    # Templates may add text around the response, so search it within the span.
    start, stop = response.spans[-1]
    place = response.text.find(content, start, stop)
    if place < 0:
        raise row.error(f"the chat template removes or changes the steps: {content[:60]!r}")
    # The first step includes text that the template adds before it.
    bounds = [start, *(place + end for end in ends[:-1]), stop]
    spans = tuple(pairwise(bounds))
    untrained = [replace(before, spans=()) for before in pieces.texts[:-1]]
    return replace(pieces, texts=(*untrained, replace(response, spans=spans)))


def _solutions(encoded: Encoded[list[Solution]], config: StepDataConfig, report: DataReport) -> list[dict[str, object]]:
    pairs = zip(encoded.read, encoded.tokens, strict=True)
    made = (_item(encoded.row, solution, tokens, config, report) for solution, tokens in pairs)
    return [item for item in made if item is not None]


def _item(
    row: Row, solution: Solution, tokens: Tokens, config: StepDataConfig, report: DataReport
) -> dict[str, object] | None:
    """Return a solution's stored columns, without steps beyond `max_len`; None if no label remains."""
    # `fitting` may cut within a step, so steps are cut by their ends below.
    kept = fitting(row, [replace(tokens, merged=False)], config, report)
    if kept is None:
        return None
    # A step that is cut has no end to read a score at.
    ends = [stop for _, stop in tokens.spans if stop <= config.max_len]
    num_steps = len(tokens.spans)
    labels = _trained_labels(solution.labels[: len(ends)], last_only=config.train_on_last_step_only)
    num_trained = sum(label is not None for label in labels)
    within = f" in the {len(ends)} of {num_steps} steps within max_len" if len(ends) < num_steps else ""
    if num_trained == 0:
        report.note("dropped_untrained", f"{row.where}: no labelled step{within}")
        return None
    if within:
        report.note("truncated", f"{row.where}: {len(ends)} of {num_steps} steps are within {config.max_len:,} tokens")
    _count(report, solution, labels, config.separator)
    report.tokens += ends[-1]
    report.trained_tokens += num_trained
    report.count_turns(kept[0])
    return {
        "token_ids": tokens.ids[: ends[-1]],
        "ends": ends,
        # NaN marks steps without a label, since Arrow's nulls would need a second array.
        "labels": [math.nan if label is None else label for label in labels],
        "start": tokens.spans[0][0],
        "length": ends[-1],
        "num_trained": num_trained,
        **stored_pictures(kept[0].pictures),
    }


def _trained_labels(labels: tuple[float | None, ...], *, last_only: bool) -> tuple[float | None, ...]:
    if not last_only:
        return labels
    last = max((place for place, label in enumerate(labels) if label is not None), default=-1)
    return tuple(label if place == last else None for place, label in enumerate(labels))


def _count(report: DataReport, solution: Solution, labels: tuple[float | None, ...], separator: str) -> None:
    """Count steps by label, and solutions with the separator inside a step, which inference would split differently."""
    known = [label for label in labels if label is not None]
    content, ends = joined_steps(solution.steps, separator)
    counted = {
        "right steps": sum(label == 1 for label in known),
        "wrong steps": sum(label == 0 for label in known),
        "steps with a probability": sum(0 < label < 1 for label in known),
        "solutions with the step separator within a step": int(step_ends(content, separator) != ends),
    }
    for what, count in counted.items():
        report.details[what] = report.details.get(what, 0) + count


STEPS = Kind(
    "solutions",
    {
        "token_ids": NUMBERS,
        "ends": NUMBERS,
        "labels": pa.list_(pa.float32()),
        "start": pa.int32(),
        "length": pa.int32(),
        "num_trained": pa.int32(),
    },
    step_formats,
    lambda row, solutions, config: [_conversation(solution, config.separator) for solution in solutions],
    _solutions,
    _item_at,
    _marked,
)
