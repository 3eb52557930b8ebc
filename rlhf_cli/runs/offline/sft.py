"""Task definition for `rlhf sft`: data, model and objective."""

from functools import partial

from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.data import DataConfig, TemplateConfig
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.task import Items, OfflineTask, load_items, offline_model
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline.sft import SequenceItems, sft_objective


def sft_task(config: SFTConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)
    items = load_sequence_items(config.data, config.template, model, seed=config.batch.seed, reader=reader)
    return OfflineTask(
        command=config.command,
        objective=sft_objective,
        items=items,
        summary=items.data.data.report.summary,
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
        identity=lambda: {"keep_dropout": config.model.keep_dropout},
    )


def load_sequence_items(
    data: DataConfig, template: TemplateConfig, model: ModelPlan, *, seed: int, reader: PictureReader | None = None
) -> Items[SequenceItems]:
    """Load tokenized examples, with images if there is a reader. Raises UsageError like `load_items`."""
    load = partial(SEQUENCES.load, data, model.tokenizer, template=template, seed=seed, reader=reader)
    return load_items(data, model, load, SequenceItems)
