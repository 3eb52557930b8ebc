"""The task of `rlhf sft`: its data, model and objective."""

from typing import Any

from rlhf_cli.config.commands.sft import SFTConfig
from rlhf_cli.data.sft_data import load_sft_sequences
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.run import OfflineTask, load_items, offline_model
from rlhf_cli.trainers.offline.sft import SequenceItems, sft_objective


def sft_task(config: SFTConfig) -> OfflineTask:
    """Read the data and return the task of these settings. Raise UsageError if settings, model or data do not fit."""
    data, seed = config.data, config.batch.seed
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)

    def load(**source: Any) -> SequenceItems:
        return SequenceItems(load_sft_sequences(data, model.tokenizer, seed=seed, **source))

    items = load_items(data, model, load)
    return OfflineTask(
        command="sft",
        objective=sft_objective,
        items=items,
        summary=items.data.data.report.summary,
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
    )
