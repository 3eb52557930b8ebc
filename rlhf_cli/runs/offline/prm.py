"""Task definition for `rlhf prm`: data, model and objective."""

from typing import Any

from transformers import PreTrainedModel

from rlhf_cli.algorithms.process_reward import finish_step_metrics
from rlhf_cli.commands.prm import PRMConfig
from rlhf_cli.data.step_data import STEPS
from rlhf_cli.models.classifiers import refuse_several_labels, refuse_token_classes
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.reward_model import STEP_SEPARATOR
from rlhf_cli.runs.offline.task import OfflineTask, load_items, offline_model
from rlhf_cli.trainers.offline.prm import StepItems, step_objective


def prm_task(config: PRMConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    data = config.data
    model = offline_model(config)
    refuse_several_labels(model.architecture, f"--pretrain {model.base.pretrain!r}")
    refuse_token_classes(model.architecture, f"--pretrain {model.base.pretrain!r}")

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        """Load the model and add the separator to its configuration, where inference reads it."""
        hf_model = load_value_backbone(*args, **kwargs)
        setattr(hf_model.config, STEP_SEPARATOR, data.separator)
        return hf_model

    # Evaluate all steps, even if training uses only the last one.
    all_steps = data.model_copy(update={"train_on_last_step_only": False})
    items = load_items(config, STEPS, data, model, StepItems, eval_data=all_steps)
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
