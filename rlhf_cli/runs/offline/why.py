"""`rlhf why` for offline commands: the loss of a row and its tokens, in an optimizer step that is run again."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.algorithms.formulas import number
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.command_table import COMMANDS, OFFLINE
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.data.packing.packs import Pack, TokenSequence
from rlhf_cli.data.preference_data import LabelledItem, Pair
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.data.step_data import StepItem
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.runs.offline.run import Ready, checked_identity, make_ready
from rlhf_cli.runs.offline.task import OfflineTask
from rlhf_cli.runs.run_directory import NOT_REPEATED, recorded_config, run_directory
from rlhf_cli.tracking.sinks import read_metrics
from rlhf_cli.tracking.tracker import SilentTracker
from rlhf_cli.trainers.offline.loop import LoadedItems, Objective, Schedule, bind, train
from rlhf_cli.trainers.offline.sft import SFTObjective

_LOGPROB, _LOSS = "log-prob", "loss"
_Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
_Pass: TypeAlias = tuple[Pack, _Outputs]
"""Micro-batch, and what the model returned for it."""
_COMMANDS = [name for name, command in COMMANDS.items() if command.panel == OFFLINE]


@dataclass(frozen=True)
class ExplainedRow:
    """A row in an optimizer step that was run again.

    - `recorded`, `metrics`: metrics of the step in the run and here.
    - `own`: metrics of the row by itself, with the weights before the step.
    - `sequences`: (token ids, values by name) of its trained tokens in the step, one entry per sequence of a pair.
    """

    where: str
    step: int
    steps: list[int]
    recorded: dict[str, float]
    metrics: dict[str, float]
    own: dict[str, float]
    item: object
    sequences: list[tuple[list[int], dict[str, list[float]]]]


def explain_row(settings: WhyGroup) -> tuple[list[str], Callable[[], dict[str, object]]]:
    """Return the explanation of a row, or without one of a step, as lines, and a function that returns JSON values."""
    root = Path(settings.run).expanduser()
    config: OfflineConfig = recorded_config(root, _COMMANDS)
    task = resolve_name(f"rlhf_cli.runs.{COMMANDS[config.command].task}")(config)
    recorded = read_metrics(root)
    data: LoadedItems[object] = task.items.data
    batches = _batches(config, data)
    if settings.sample is None:
        return _explain_step(settings, config, task, recorded)
    index = _index(data, settings.sample)
    # One step per epoch trains an item.
    steps = [number for number, items in enumerate(batches, start=1) if index in items and number in recorded]
    if not steps:
        raise UsageError(f"{root} has not trained {settings.sample} yet: it has {len(recorded)} optimizer steps")
    step = settings.step or steps[0]
    if step not in steps:
        raise UsageError(f"--step {step} did not train {settings.sample}: set --step {listed(map(str, steps), 'or')}")
    # Before the steps run again, which can take minutes. For pairs, `num_trained` counts both responses.
    if settings.token is not None and settings.token >= (most := int(data.num_trained[index])):
        raise UsageError(f"--token {settings.token}: {settings.sample} has {most} trained tokens")
    with _before(step, config, task) as ready:
        own = _own_metrics(ready, index)
        seen: list[_Pass] = []
        metrics = _train(ready, _watched(ready.task.objective, seen), step - 1, step)
    row = ExplainedRow(
        _place(data, index),
        step,
        steps,
        recorded[step],
        metrics,
        own,
        data.data.items[index],
        _sequences(ready, index, step, seen),
    )
    tokenizer = task.model.tokenizer
    return list(lines(row, config.command, tokenizer, settings.token)), partial(
        explanation, row, config.command, tokenizer
    )


@contextmanager
def _before(step: int, config: OfflineConfig, task: OfflineTask) -> Iterator[Ready]:
    """Yield the trainer of a run with the weights before a step."""
    store = CheckpointStore(run_directory(config.checkpoint).checkpoints, max_num=1)
    resume = store.latest(at_most=step - 1)
    distributed.join_process_group()
    try:
        checked_identity(config, task, resume, repeats=True)
        ready = make_ready(config, task, resume)
        _train(ready, ready.task.objective, resume.step if resume else 0, step - 1)
        yield ready
    finally:
        distributed.leave_process_group()


def _explain_step(
    settings: WhyGroup, config: OfflineConfig, task: OfflineTask, recorded: Mapping[int, Mapping[str, float]]
) -> tuple[list[str], Callable[[], dict[str, object]]]:
    """Return the rows of a step, the largest loss first."""
    step, data = settings.step, task.items.data
    if step is None or step not in recorded:
        what = "set --sample FILE:LINE or" if step is None else f"--step {step}: the run has no such step; set"
        raise UsageError(f"{what} --step N, up to {max(recorded, default=0)}")
    with _before(step, config, task) as ready:
        own = {index: _own_metrics(ready, index) for index in _batches(config, data)[step - 1]}
    # NaN first, which is the worst.
    worst = sorted(own, key=lambda index: -loss if (loss := own[index]["loss"]) == loss else -math.inf)
    found = [
        f"Optimizer step {step} of rlhf {config.command}: loss {number(recorded[step]['loss'])}",
        f"Rows by their own loss with the weights before the step, of {len(worst)}",
    ]
    for index in worst:
        text = "".join(
            text_of(task.model.tokenizer, ids, skip_special_tokens=True) for _, ids in _texts(data.data.items[index])
        )
        found.append(f"  {number(own[index]['loss']):>12}  {_place(data, index):24} {text!r:.60}")
    rows = [{"row": _place(data, index), "metrics": own[index]} for index in worst]
    return found, lambda: {"step": step, "rows": rows}


def _index(data: LoadedItems[object], sample: str) -> int:
    """Return the number of the item with this file and line."""
    for index in range(len(data.lengths)):
        place = _place(data, index)
        if place == sample or place.endswith(f"/{sample}"):
            return index
    raise UsageError(f"--sample {sample}: no trained row has this file and line; the first is {_place(data, 0)}")


def _place(data: LoadedItems[object], index: int) -> str:
    """Return file and line of an item, as in the ids of sampled responses."""
    return re.sub(r" (?:line|row) (\d+)$", r":\1", data.data.where(index))


def _batches(config: OfflineConfig, data: LoadedItems[object]) -> StepBatches:
    """Return the item indices of each optimizer step."""
    batch = config.batch
    return StepBatches(len(data.lengths), batch_size=batch.train_batch_size, epochs=batch.max_epochs, seed=batch.seed)


class _Metrics(SilentTracker):
    """Keeps the metrics of the last step."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Keep the metrics."""
        self.last = dict(metrics)


def _train(ready: Ready, objective: Objective, start: int, end: int) -> dict[str, float]:
    """Train from one step to another without saving or evaluating. Returns the metrics of the last step."""
    tracker = _Metrics()
    limit = ready.config.optim.max_skipped_steps
    train(
        ready.engine,
        objective,
        data=ready.items.data,
        eval_data=None,
        share=ready.share,
        schedule=Schedule(start, end, save_steps=-1, eval_steps=-1, max_skipped_steps=limit),
        hooks=ready.hooks(tracker, lambda step: None, lambda: False),
    )
    return tracker.last


def _own_metrics(ready: Ready, index: int) -> dict[str, float]:
    """Return the metrics of an item by itself."""
    data = ready.items.data
    batches: list[object] = [data.collate([index])]
    if ready.reference.prepare is not None:
        batches = ready.reference.prepare(ready.engine, batches)
    totals = StepTotals(num_tokens=int(data.num_trained[index]), num_sequences=1)
    return ready.task.finish_metrics(ready.engine.evaluate(batches, bind(ready.task.objective, totals)))


def _watched(objective: Objective, seen: list[_Pass]) -> Objective:
    """Return the objective; it adds (pack, outputs) of each micro-batch's first forward pass to `seen`."""

    def watched(model: nn.Module, batch: object, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        passes: list[_Pass] = []

        def forward(pack: Pack, *args: object, **settings: object) -> object:
            outputs = model(pack, *args, **settings)
            passes.append((pack, outputs))
            return outputs

        result = objective(cast("nn.Module", forward), batch, totals)
        seen.append(passes[0])
        return result

    return watched


def _sequences(
    ready: Ready, index: int, step: int, seen: list[_Pass]
) -> list[tuple[list[int], dict[str, list[float]]]]:
    data = ready.items.data
    dealt = ready.share.deal(data, _batches(ready.config, data)[step - 1], ready.engine.token_limit)
    ((members, (pack, outputs)),) = [pair for pair in zip(dealt, seen, strict=True) if index in pair[0]]
    size, place = pack.num_sequences // len(members), members.index(index)
    columns, objective = _columns(outputs), ready.task.objective
    # Without weights and dft, the loss is only the negative log-prob.
    if isinstance(objective, SFTObjective) and (objective.loss != "nll" or pack.weights_K is not None):
        columns[_LOSS] = objective.token_losses(columns[_LOGPROB], pack)
    values = {name: tensor.detach().float().cpu().numpy() for name, tensor in columns.items()}
    cu, targets_K = pack.cu_trained.tolist(), pack.targets_K.cpu().numpy()
    spans = [slice(cu[number], cu[number + 1]) for number in range(place * size, (place + 1) * size)]
    return [
        (targets_K[span].tolist(), {name: column[span].tolist() for name, column in values.items()}) for span in spans
    ]


def _columns(outputs: _Outputs) -> dict[str, torch.Tensor]:
    """Return the values per trained token of a model's outputs, by name."""
    if isinstance(outputs, tuple):
        return {_LOGPROB: outputs[0]}
    if isinstance(outputs, Mapping):
        return {name: values for name, values in outputs.items() if values.dim() == 1}
    return {"score": outputs}


def explanation(row: ExplainedRow, command: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the explanation of a row for other programs.

    Returns:
        - `lines`: text for the row; `equality`: comparison of the step with the run.
        - `tokens`: `text` and `values` of each trained token, with the number of its sequence. Values that are not
          finite are None.
    """
    tokens = []
    for sequence, (token_ids, columns) in enumerate(row.sequences):
        for place, token in enumerate(token_ids):
            values = {name: float(column[place]) for name, column in columns.items()}
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            text = text_of(tokenizer, [token], skip_special_tokens=False)
            tokens.append({"text": text, "values": {"sequence": sequence, **finite}})
    whole = lines(row, command, tokenizer, None)
    return {"lines": list(whole), "equality": [_equality(row)], "tokens": tokens}


def lines(row: ExplainedRow, command: str, tokenizer: PreTrainedTokenizerBase, token: int | None) -> Iterator[str]:
    """Yield the explanation of a row: text, metrics by itself, its part of the step, and tokens or one of them."""
    yield f"{row.where}, optimizer step {row.step} of rlhf {command}; trained in steps {listed(map(str, row.steps))}"
    for title, token_ids in _texts(row.item):
        yield f"  {title:12}{text_of(tokenizer, token_ids, skip_special_tokens=False)!r}"
    yield ""
    yield "By itself, with the weights before the step"
    yield from (f"  {name:24}{number(value)}" for name, value in row.own.items())
    yield ""
    yield f"In the step, with {row.metrics['num_sequences']:.0f} rows"
    yield f"  loss {number(row.metrics['loss'])}, gradient norm {number(row.metrics['grad_norm'])}"
    if token is not None and token >= (most := max(len(token_ids) for token_ids, _ in row.sequences)):
        raise UsageError(f"--token {token}: {most} tokens are trained, 0 to {most - 1}")
    for count, (token_ids, columns) in enumerate(row.sequences):
        if len(row.sequences) > 1:
            yield f"  {('chosen', 'rejected')[count]}"
        texts = [text_of(tokenizer, [one], skip_special_tokens=False) for one in token_ids]
        yield from _table(texts, columns, token)
    if isinstance(row.item, TokenSequence) and _LOGPROB in row.sequences[0][1]:
        yield from _part_of_mean(row, token)
    yield ""
    yield _equality(row)


def _table(texts: list[str], columns: Mapping[str, list[float]], token: int | None) -> Iterator[str]:
    yield "    token             " + "".join(f"{name:>12}" for name in columns)
    for place, text in enumerate(texts):
        if token in (None, place):
            cells = "".join(f"{values[place]:12.4f}" for values in columns.values())
            yield f"  {place:4d} {text!r:15.15}{cells}"
    if token is None and len(texts) > 1:
        yield from (f"  sum of {name}: {number(float(np.sum(values)))}" for name, values in columns.items())


def _part_of_mean(row: ExplainedRow, token: int | None) -> Iterator[str]:
    """Yield the part of a mean loss per token, in nats."""
    columns = row.sequences[0][1]
    losses = np.array(columns[_LOSS]) if _LOSS in columns else -np.array(columns[_LOGPROB])
    total, num_tokens = float(np.sum(losses if token is None else losses[token])), row.metrics["num_tokens"]
    part = total / num_tokens
    what = "row" if token is None else "token"
    yield (
        f"  part of this {what} in the loss: {_terms(columns)} / tokens of the step = {number(total)} / "
        f"{num_tokens:.0f} = {number(part)}, {part / row.metrics['loss']:.2%}"
    )


def _terms(columns: Mapping[str, list[float]]) -> str:
    return "sum of losses" if _LOSS in columns else "-sum of log-probs"


def _texts(item: object) -> Iterator[tuple[str, list[int]]]:
    """Yield (title, token ids) of the parts of an item."""
    if isinstance(item, Pair):
        yield "prompt", item.prompt_ids.tolist()
        yield "chosen", item.chosen.token_ids.tolist()
        yield "rejected", item.rejected.token_ids.tolist()
    elif isinstance(item, LabelledItem):
        yield "prompt", item.prompt_ids.tolist()
        yield "desirable" if item.desirable else "undesirable", item.response.token_ids.tolist()
    elif isinstance(item, TokenSequence):
        bounds = [0, *(np.flatnonzero(np.diff(item.loss_mask)) + 1).tolist(), item.token_ids.size]
        for start, end in pairwise(bounds):
            yield "trained" if item.loss_mask[start] else "read", item.token_ids[start:end].tolist()
    elif isinstance(item, StepItem):
        yield "prompt", item.token_ids[: item.start].tolist()
        starts = [item.start, *item.ends[:-1].tolist()]
        for start, end, label in zip(starts, item.ends.tolist(), item.labels.tolist(), strict=True):
            yield f"step {label:g}", item.token_ids[start:end].tolist()


def _equality(row: ExplainedRow) -> str:
    """Say whether the step equals that of the run."""
    names = [name for name in row.recorded if not name.startswith(NOT_REPEATED)]
    found = row.metrics
    differing = [name for name in names if row.recorded[name] != found.get(name)]
    if not differing:
        return f"Equal to the run: all {len(names)} metrics of step {row.step}."
    pairs = [
        f"{name} {number(row.recorded[name])} in the run, {number(found.get(name, np.nan))} here" for name in differing
    ]
    return f"Different from the run: {'; '.join(pairs)}."
