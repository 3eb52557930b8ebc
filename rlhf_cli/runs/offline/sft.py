"""Task definition for `rlhf sft`: data, model and objective."""

from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.task import OfflineTask, load_items, offline_model
from rlhf_cli.runs.run_identity import objective_identity
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline.sft import SequenceItems, SFTObjective


def sft_task(config: SFTConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    _check_noise(config, model)
    items = load_items(config, SEQUENCES, config.data, model, SequenceItems)
    return OfflineTask(
        command=config.command,
        objective=SFTObjective(config.objective.loss, config.objective.neftune_noise_alpha, config.batch.seed),
        items=items,
        summary=items.data.data.report.summary,
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
        identity=lambda: {"keep_dropout": config.model.keep_dropout, **objective_identity(config.objective)},
    )


def _check_noise(config: SFTConfig, model: ModelPlan) -> None:
    """Raise UsageError if noise on the embeddings is unsupported by the model."""
    text = model.architecture.get_text_config()
    # Gemma 3n and 4 read token ids again in each layer, and embeddings with noise have none.
    if config.objective.neftune_noise_alpha and getattr(text, "hidden_size_per_layer_input", 0):
        raise UsageError(f"neftune_noise_alpha: layers of {text.model_type} have embeddings of their own: remove it")
