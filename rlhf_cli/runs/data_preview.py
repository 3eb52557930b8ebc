"""Previews for `rlhf data`: loads data with the loading function of the training command.

data_view.py prints them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.data import DataConfig, LabelledDataConfig, PreferenceDataConfig, PromptConfig, StepDataConfig
from rlhf_cli.config.inspection import ShowConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.data.loading import Kind, LoadedData
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.preference_data import PAIRS, RESPONSES, LabelledItem, Pair
from rlhf_cli.data.preparing import COUNTED, DataReport
from rlhf_cli.data.preview import Decode, PreviewPart, ShownExample, part_of, spread
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.data.reading.sources import ReadSource
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.step_data import STEPS, StepItem
from rlhf_cli.models.adapters import base_of, read_config
from rlhf_cli.models.finding import FoundModel, adapter_folder, find_model
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.models.vision.pictures import PlacedPicture
from rlhf_cli.runs.data_settings import settings_of
from rlhf_cli.runs.episode_preview import Rehearsal, read_turns
from rlhf_cli.runs.episodes import EnvironmentPlan, find_environment
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.tracking.terminal.rows_bar import rows_bar
from rlhf_cli.trainers.offline.kto import LabelledItems, partners_of
from rlhf_cli.trainers.offline.pairs import PairItems

"""Report counters for prompts that are dropped as invalid or too long."""


@dataclass(frozen=True)
class _Happened:
    """Rows with the same outcome: description, count, and details about the first rows."""

    what: str
    count: int
    rows: list[str]


@dataclass(frozen=True)
class Preview:
    """Data as loaded by a command.

    - `num_trained`: trained tokens; None for prompts.
    - `lengths`: number of items by length in tokens; `lengths_are` describes the items.
    - `limit`: longer rows are truncated or dropped; `limit_is` describes the limit.
    - `most_tokens`: largest number of tokens that an item uses in a micro-batch, described by `most_is`.
    - `room`: tokens that fit in a micro-batch, described by `room_is`.
    - `rehearsal`: an episode to play with an environment.
    """

    title: str
    sources: list[ReadSource]
    num_rows: int
    num_items: int
    items_are: str
    num_tokens: int | None
    num_trained: int | None
    end_of_turn: str | None
    examples: list[ShownExample]
    lengths: dict[int, int]
    lengths_are: str
    limit: int
    limit_is: str
    most_tokens: int
    most_is: str
    room: int
    room_is: str
    happened: list[_Happened]
    special_tokens: list[str]
    rehearsal: Rehearsal | None = None


def inspect_data(config: DataCommandConfig) -> list[Preview]:
    """Return previews of the training data and, if set, of the evaluation data.

    Raises:
        UsageError: the command would reject the data.
    """
    settings: Any = settings_of(config.show.for_, config.data, config.template)
    tokenizer = load_tokenizer(config.model)
    found = found_model(config)
    reader = picture_reader(config.pictures, config.model, found, tokenizer)
    if config.show.reads_prompts:
        # Online commands read prompts, for which trained tokens and packing do not apply.
        return [_prompts(config, settings, tokenizer, reader, found)]
    named = {"Training data": (settings.dataset, settings.dataset_split)}
    if settings.eval_dataset is not None:
        named["Evaluation data"] = (settings.eval_dataset, settings.eval_split)
    previews = []
    with rows_bar(shown=True) as progress:
        for title, (dataset, split) in named.items():
            reading = _READINGS[type(settings)]
            data = reading.kind.load(
                settings,
                tokenizer,
                dataset=dataset,
                split=split,
                seed=config.show.seed,
                template=config.template,
                progress=progress,
                reader=reader,
            )
            previews.append(_offline(title, reading, data, config, tokenizer))
    return previews


def found_model(config: DataCommandConfig) -> FoundModel:
    """Find the model, or the adapter's base model."""
    adapter = adapter_folder(config.model.pretrain)
    base = config.model.pretrain if adapter is None else base_of(adapter, read_config(adapter))
    return find_model(ModelSource(pretrain=base, trust_remote_code=config.model.trust_remote_code))


@dataclass(frozen=True)
class _DataReading:
    """How an offline command loads data and how items are shown.

    - `takes`: returns the tokens per item in a micro-batch.
    """

    kind: Kind[Any, Any, Any]
    parts: Callable[[Any, Decode], list[PreviewPart]]
    lengths_are: str
    takes: Callable[[LoadedData[Any]], np.ndarray] = lambda data: data.columns["length"]
    facts: Callable[[Any], dict[str, str]] = lambda item: {}


def _counted(report: DataReport) -> list[_Happened]:
    """Summarize dropped and special items."""
    counts = [_Happened(what, getattr(report, name), report.noted.get(name, [])) for name, what in COUNTED.items()]
    return [*counts, _controls(report)]


def _controls(report: DataReport) -> _Happened:
    """Summarize rows with special tokens in messages, with counts per token."""
    listed = [f"{token}: {count:,} rows" for token, count in report.control_tokens.items()]
    what = "with special tokens in message, call or tool text, which become control tokens"
    return _Happened(what, report.control_rows, [f"first: {report.control_at}", *listed])


def _offline(
    title: str, reading: _DataReading, data: LoadedData[object], config: DataCommandConfig, tokenizer: object
) -> Preview:
    report, items, decode = data.report, data.items, _decoder(tokenizer)
    examples = [
        ShownExample(place + 1, data.where(place), reading.parts(items[place], decode), reading.facts(items[place]))
        for place in spread(len(items), config.show.num_rows)
    ]
    counts = [_Happened(what, count, []) for what, count in report.details.items()]
    counts += _counted(report)
    return Preview(
        title=title,
        sources=report.sources,
        num_rows=report.rows,
        num_items=report.items,
        items_are=report.items_are,
        num_tokens=report.tokens,
        num_trained=report.trained_tokens,
        end_of_turn=report.end_of_turn,
        examples=examples,
        lengths=report.lengths,
        lengths_are=reading.lengths_are,
        limit=config.data.max_len,
        limit_is=f"max_len {config.data.max_len:,}",
        most_tokens=(most := int(reading.takes(data).max())),
        most_is=f"the longest of the {report.items_are} uses {most:,} tokens",
        room=config.show.room,
        room_is=_room(config.show),
        happened=[happened for happened in counts if happened.count],
        special_tokens=_special_tokens_of(tokenizer),
    )


def _prompts(
    config: DataCommandConfig,
    settings: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    reader: PictureReader | None,
    found: FoundModel,
) -> Preview:
    decode, longest, seed = _decoder(tokenizer), config.data.max_new_tokens, config.show.seed
    # One episode is played at a time, so do not start more processes.
    one_worker = config.episodes.model_copy(update={"environment_num_workers": 1})
    plan = find_environment(one_worker, settings, config.template, found, tokenizer)
    environment = None if plan is None else plan.description
    data = load_prompts(
        settings,
        tokenizer,
        max_new_tokens=longest,
        seed=seed,
        template=config.template,
        reader=reader,
        environment=environment,
    )
    report = data.report
    shown = [(place, data.prompts[place]) for place in spread(len(data.prompts), config.show.num_rows)]
    room = config.data.max_len - config.data.max_new_tokens
    counts = [
        _Happened("with ground truth", report.labelled, []),
        *_counted(report),
    ]
    return Preview(
        title="Prompts",
        sources=report.sources,
        num_rows=report.rows,
        num_items=report.items,
        items_are=report.items_are,
        num_tokens=None,
        num_trained=None,
        end_of_turn=None,
        examples=[
            ShownExample(place + 1, data.where(prompt), _parts_of_prompt(prompt, decode), _facts_of_prompt(prompt))
            for place, prompt in shown
        ],
        lengths=report.lengths,
        lengths_are="prompts",
        limit=room,
        limit_is=f"max_len {config.data.max_len:,} minus max_new_tokens {config.data.max_new_tokens:,}",
        most_tokens=config.data.max_len,
        most_is=f"a prompt with response uses up to {config.data.max_len:,} tokens (max_len)",
        room=config.show.room,
        room_is=_room(config.show),
        happened=[happened for happened in counts if happened.count],
        special_tokens=_special_tokens_of(tokenizer),
        rehearsal=None if plan is None else _rehearsal(config, plan, data, decode),
    )


def _rehearsal(config: DataCommandConfig, plan: EnvironmentPlan, data: PromptData, decode: Decode) -> Rehearsal:
    """Prepare an episode with the first prompt. Raises UsageError if the row or the script is invalid."""
    # Check here, because the preview would otherwise fail after half the output.
    plan.check_rows(data)
    first = data.prompts[0]
    script = None if config.episodes.turns is None else read_turns(config.episodes.turns)
    return Rehearsal(plan, first, data.where(first), decode, config.data.max_new_tokens, config.show.seed, script)


def _room(show: ShowConfig) -> str:
    """Describe the settings that determine the micro-batch size."""
    ranks = f" on {show.sequence_parallel_size} ranks" if show.sequence_parallel_size > 1 else ""
    return f"train_max_tokens_per_gpu {show.train_max_tokens_per_gpu:,}{ranks}"


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return a decoder from token IDs to exact text, including special tokens."""
    # Cleaning up spaces would hide how the text is tokenized.
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens as they appear in decoded text."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _parts_of_sequence(sequence: TokenSequence, decode: Decode) -> list[PreviewPart]:
    ids, mask = sequence.token_ids.tolist(), sequence.loss_mask.tolist()
    return [part_of("sequence", ids, mask, decode, pictures=sequence.pictures)]


def _parts_of_pair(pair: Pair, decode: Decode) -> list[PreviewPart]:
    return [
        _untrained("prompt", pair.prompt_ids.tolist(), decode, pair.pictures),
        _branch("chosen", pair.prompt_ids, pair.chosen, decode),
        _branch("rejected", pair.prompt_ids, pair.rejected, decode),
    ]


def _parts_of_labelled(item: LabelledItem, decode: Decode) -> list[PreviewPart]:
    name = "desirable response" if item.desirable else "undesirable response"
    prompt = _untrained("prompt", item.prompt_ids.tolist(), decode, item.pictures)
    return [prompt, _branch(name, item.prompt_ids, item.response, decode)]


def _parts_of_solution(item: StepItem, decode: Decode) -> list[PreviewPart]:
    """Return the prompt and all steps."""
    # A step's label is at the last token, which is therefore the trained one.
    ids, ends = item.token_ids.tolist(), item.ends.tolist()
    parts = [_untrained("prompt", ids[: item.start], decode, item.pictures)]
    for number, (begin, end, label) in enumerate(zip([item.start, *ends[:-1]], ends, item.labels, strict=True), 1):
        is_read = [False] * (end - begin - 1) + [not np.isnan(label)]
        name = f"step {number}, {_label_name(float(label))}"
        parts.append(part_of(name, ids[begin:end], is_read, decode, behind=ids[:begin]))
    return parts


def _label_name(label: float) -> str:
    known = {1.0: "right", 0.0: "wrong"}
    return "no label" if np.isnan(label) else known.get(label, f"right with probability {label:g}")


def _parts_of_prompt(prompt: Prompt, decode: Decode) -> list[PreviewPart]:
    teachers = () if prompt.teacher_ids is None else (_untrained("prompt of the teacher", prompt.teacher_ids, decode),)
    return [_untrained("prompt", prompt.prompt_ids, decode, prompt.pictures), *teachers]


def _untrained(
    name: str, token_ids: Sequence[int], decode: Decode, pictures: Sequence[PlacedPicture] = ()
) -> PreviewPart:
    return part_of(name, token_ids, [False] * len(token_ids), decode, pictures=pictures)


def _branch(name: str, prompt_ids: Any, branch: Any, decode: Decode) -> PreviewPart:
    return part_of(name, branch.token_ids.tolist(), branch.loss_mask.tolist(), decode, behind=prompt_ids.tolist())


def _facts_of_prompt(prompt: Prompt) -> dict[str, str]:
    return {"ground truth": "none" if prompt.label is None else prompt.label}


def _facts_of_pair(pair: Pair) -> dict[str, str]:
    return {} if pair.margin is None else {"margin": f"{pair.margin:g}"}


def _taken_by_pairs(data: LoadedData[Pair]) -> np.ndarray:
    return PairItems(data, share_prompts=True, read_ends=False, columns={}).lengths


def _taken_by_responses(data: LoadedData[LabelledItem]) -> np.ndarray:
    return LabelledItems(data, partners_of(data), {}).lengths


_READINGS: dict[type[SettingsGroup], _DataReading] = {
    DataConfig: _DataReading(SEQUENCES, _parts_of_sequence, "sequences"),
    PreferenceDataConfig: _DataReading(
        PAIRS, _parts_of_pair, "pairs (the longer side with the prompt)", _taken_by_pairs, _facts_of_pair
    ),
    StepDataConfig: _DataReading(STEPS, _parts_of_solution, "solutions with the prompt"),
    LabelledDataConfig: _DataReading(RESPONSES, _parts_of_labelled, "responses with the prompt", _taken_by_responses),
}
"""Kind of data, and how items are shown, by settings class."""
