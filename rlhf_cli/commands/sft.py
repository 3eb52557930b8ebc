"""`rlhf sft`: supervised fine-tuning.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rlhf_cli.commands.ranks import begin_ranks
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.model import AdapterConfig, ModelConfig
from rlhf_cli.config.train import (
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    OfflineBatchConfig,
    SingleOptimConfig,
    TrackingConfig,
)

if TYPE_CHECKING:
    from rlhf_cli.commands.offline import OfflineTask


class SFTConfig(BaseModel):
    """Settings of `rlhf sft`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig
    batch: OfflineBatchConfig = OfflineBatchConfig(max_epochs=2)
    optim: SingleOptimConfig = SingleOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()


def sft(config: SFTConfig) -> None:
    """Fine-tune a language model on examples: prompts with responses, conversations, or plain text."""
    begin_ranks(config.checkpoint, config.launch, config.tracking)

    from rlhf_cli.commands.offline import run_offline

    run_offline(config, sft_task(config))


def sft_task(config: SFTConfig) -> "OfflineTask":
    """Return the task of these settings, its data read. Raise UsageError for what can be found wrong with them."""
    from rlhf_cli.commands.offline import OfflineTask, load_items, offline_model
    from rlhf_cli.data.sft_data import load_sft_sequences
    from rlhf_cli.models.adapters import require_language_model
    from rlhf_cli.models.loading import load_causal_lm
    from rlhf_cli.models.policy import PolicyModel
    from rlhf_cli.trainers.sft import SequenceItems, sft_objective

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
