"""Task definition for `rlhf sft`: data, model and objective."""

from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.task import OfflineTask, load_items, offline_model
from rlhf_cli.trainers.offline.sft import SequenceItems, sft_objective


def sft_task(config: SFTConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    items = load_items(config, SEQUENCES, config.data, model, SequenceItems)
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
