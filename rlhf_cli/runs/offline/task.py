"""Task definition of an offline command: model, items and objective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.backends.training import distributed_env
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed, check_secondary_parts
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.data import DataConfig, TemplateConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.loading import Item, Kind, LoadedData, Settings
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.data.tokenizing.tokenizer import check_token_ids
from rlhf_cli.models.requirements import check_loadable, check_row_positions
from rlhf_cli.models.routers import check_router_loss
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel, check_whole_packs
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.tensor_parallel import check_tensor_parallel
from rlhf_cli.models.vision.freezing import check_trained_parts
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.run_directory import check_not_replaced
from rlhf_cli.runs.trained_model import ModelPlan, trained_model
from rlhf_cli.tracking.terminal.rows_bar import rows_bar
from rlhf_cli.trainers.offline.distill import TaughtItems, taught_items
from rlhf_cli.trainers.offline.loop import LoadedItems, Objective, Prepare, Share
from rlhf_cli.trainers.offline.sft import SequenceItems

_LoadedItemsT = TypeVar("_LoadedItemsT", bound=LoadedItems, covariant=True)


@dataclass(frozen=True)
class Items(Generic[_LoadedItemsT]):
    """Training items and optional evaluation items."""

    data: _LoadedItemsT
    eval_data: _LoadedItemsT | None


@dataclass(frozen=True)
class ReferenceHooks:
    """Hooks for the reference model of an objective.

    `prepare` receives the micro-batches before each step, `after_step(engine, step)` runs after each step. `save` and
    `load` receive the checkpoint folder. All hooks run on each rank.
    """

    prepare: Prepare | None = None
    after_step: Callable[[Any, int], None] | None = None
    save: Callable[[Path], None] | None = None
    load: Callable[[Path], None] | None = None


def _no_reference(items: Items[LoadedItems], share: Share) -> tuple[Items[LoadedItems], ReferenceHooks]:
    """Return the items unchanged, for objectives without a reference."""
    del share
    return items, ReferenceHooks()


def offline_model(config: OfflineConfig) -> ModelPlan:
    """Find an offline command's model. Raises UsageError like `trained_model`, or if it cannot be loaded on this
    machine.
    """
    # Cheap checks of settings first, before the model's files are read.
    check_deepspeed(config.deepspeed, param_dtype=config.model.param_dtype, optimizer=config.optim.optim)
    model = trained_model(config.model, config.adapter, seed=config.batch.seed)
    check_not_replaced(config.checkpoint, config.model.pretrain, model.base.pretrain)
    check_router_loss(config.optim.aux_loss_coef, model.architecture)
    check_trained_parts(model.base, config.adapter, model.architecture, is_adapted=model.plan is not None)
    in_4bit = model.plan is not None and model.plan.in_4bit
    check_loadable(model.base, model.architecture, in_4bit=in_4bit, partitioned=config.deepspeed.zero_stage == 3)
    _, num_ranks = distributed_env.rank_and_world_size()
    check_secondary_parts(config.deepspeed, num_ranks=num_ranks)
    check_sequence_parallel(
        model.architecture,
        config.deepspeed,
        num_ranks=num_ranks,
        attention=model.attention,
        trust_remote_code=model.base.trust_remote_code,
    )
    check_tensor_parallel(
        model.architecture,
        config.deepspeed,
        num_ranks=num_ranks,
        optim=config.optim,
        adapted=model.plan is not None,
        compile_model=config.model.compile_model,
    )
    check_whole_packs(
        config.deepspeed.sequence_parallel_size,
        aux_loss_coef=config.optim.aux_loss_coef,
        compile_model=config.model.compile_model,
    )
    return model


class _ReadingConfig(Protocol):
    """Settings for reading rows, in addition to those of the dataset."""

    @property
    def template(self) -> TemplateConfig: ...
    @property
    def pictures(self) -> PicturesConfig: ...
    @property
    def batch(self) -> BatchConfig: ...


def load_items(
    config: _ReadingConfig,
    kind: Kind[Settings, Any, Item],
    data: Settings,
    model: ModelPlan,
    make: Callable[[LoadedData[Item]], _LoadedItemsT],
    *,
    eval_data: Settings | None = None,
) -> Items[_LoadedItemsT]:
    """Load training and evaluation items. `make` returns a dataset's items; `eval_data` differs for the evaluation.

    Raises:
        UsageError: images cannot be read, or tokens or positions exceed the model's limits.
    """
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)
    seed, template = config.batch.seed, config.template
    load = partial(kind.load, tokenizer=model.tokenizer, seed=seed, template=template, reader=reader)
    rank, _ = distributed_env.rank_and_world_size()
    with rows_bar(shown=rank == 0) as progress:

        def checked(settings: Settings, dataset: str, split: str) -> _LoadedItemsT:
            items = make(load(settings, dataset=dataset, split=split, progress=progress))
            report = items.data.report
            # A token beyond the embedding fails on a GPU with an unreadable assertion.
            largest, where = report.largest_token, report.largest_token_at
            check_token_ids(largest, where, model.tokenizer, model.architecture, pretrain=model.base.pretrain)
            check_row_positions(model.architecture, report.longest(settings), dataset=dataset)
            return items

        train = checked(data, data.dataset, data.dataset_split)
        if data.eval_dataset is None:
            return Items(train, None)
        return Items(train, checked(eval_data or data, data.eval_dataset, data.eval_split))


def load_taught_items(
    config: DistillConfig | GKDConfig,
    data: DataConfig,
    model: ModelPlan,
    teachers: Sequence[ModelPlan],
    tokens: Sequence[TeacherTokens],
) -> Items[TaughtItems]:
    """Load sequences with their teachers: fixed responses of a student.

    Args:
        tokens: of each teacher; () if all read the student's tokens.

    Raises UsageError as `load_items`, or if the teachers read other rows.
    """
    items = load_items(config, SEQUENCES, data, model, partial(taught_items, config))
    if items.data.assigned is not None:
        items.data.assigned.check()
    if not tokens:
        return items
    others = [load_items(config, SEQUENCES, data, teacher, SequenceItems) for teacher in teachers]
    read = items.data.read_by([other.data.data for other in others], tokens)
    if items.eval_data is None:
        return Items(read, None)
    of_eval = [other.eval_data.data for other in others if other.eval_data is not None]
    return Items(read, items.eval_data.read_by(of_eval, tokens))


@dataclass(frozen=True)
class OfflineTask:
    """Model, items and objective of a run."""

    command: str
    objective: Objective
    items: Items[LoadedItems]
    summary: str  # data summary for the terminal
    model: ModelPlan
    load: Callable[..., PreTrainedModel]  # `load_causal_lm` or `load_value_backbone`
    # (Hugging Face model, sequence-parallel ranks) -> module for the objective
    wrap: Callable[[PreTrainedModel, SequenceRanks | None], nn.Module]
    # Runs after ranks have joined, before the model is loaded. May add columns and a reference.
    begin: Callable[[Items[LoadedItems], Share], tuple[Items[LoadedItems], ReferenceHooks]] = _no_reference
    finish_metrics: Callable[[dict[str, float]], dict[str, float]] = dict
    notices: tuple[str, ...] = ()  # shown at startup
    # Extra facts that must match to resume a checkpoint. Called on rank 0.
    identity: Callable[[], dict[str, object]] = dict
    # Last evaluation metrics -> values to save in the model configuration.
    describe: Callable[[dict[str, float]], dict[str, object]] = lambda evaluated: {}
