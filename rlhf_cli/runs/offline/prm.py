"""Task definition for `rlhf prm`: data, model and objective."""

from typing import Any

from transformers import PreTrainedModel

from rlhf_cli.algorithms.process_reward import finish_step_metrics
from rlhf_cli.commands.prm import PRMConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.step_data import STEPS, StepItem
from rlhf_cli.models.classifiers import refuse_several_labels, refuse_token_classes
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.reward_model import STEP_SEPARATOR
from rlhf_cli.runs.offline.task import OfflineTask, load_items, offline_model
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.trainers.offline.prm import StepItems, step_objective


def prm_task(config: PRMConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    data, seed = config.data, config.batch.seed
    model = offline_model(config)
    refuse_several_labels(model.architecture, f"--pretrain {model.base.pretrain!r}")
    refuse_token_classes(model.architecture, f"--pretrain {model.base.pretrain!r}")
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)

    def load(**source: Any) -> LoadedData[StepItem]:
        # Evaluate all steps even when training uses only the last one.
        own = source["dataset"] == data.dataset
        reading = data if own else data.model_copy(update={"train_on_last_step_only": False})
        return STEPS.load(reading, model.tokenizer, template=config.template, seed=seed, reader=reader, **source)

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        """Load the model and add the separator to its configuration, where inference reads it."""
        hf_model = load_value_backbone(*args, **kwargs)
        setattr(hf_model.config, STEP_SEPARATOR, data.separator)
        return hf_model

    items = load_items(data, model, load, StepItems)
    return OfflineTask(
        command=config.command,
        objective=step_objective,
        items=items,
        summary=items.data.data.report.summary,
        model=model,
        load=load_model,
        wrap=ValueModel,
        finish_metrics=finish_step_metrics,
        identity=lambda: {STEP_SEPARATOR: data.separator},
    )
