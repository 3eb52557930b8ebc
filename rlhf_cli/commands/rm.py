"""`rlhf rm`: reward models from pairs.

Leaves out the loss (algorithms/), the objective (trainers/) and everything heavy: importing this module costs settings
only.
"""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rlhf_cli.commands.ranks import begin_ranks
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.model import AdapterConfig, ModelConfig
from rlhf_cli.config.preference import RewardLossConfig
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


class RMConfig(BaseModel):
    """Settings of `rlhf rm`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    data: PreferenceDataConfig
    reward: RewardLossConfig = RewardLossConfig()
    batch: OfflineBatchConfig = OfflineBatchConfig()
    optim: SingleOptimConfig = SingleOptimConfig(learning_rate=9e-6)
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()


def rm(config: RMConfig) -> None:
    """Train a reward model: a score for a response that is higher for the chosen of two."""
    begin_ranks(config.checkpoint, config.launch, config.tracking)

    from rlhf_cli.commands.offline import run_offline

    run_offline(config, rm_task(config))


def rm_task(config: RMConfig) -> "OfflineTask":
    """Return the task of these settings, its data read. Raise UsageError for what can be found wrong with them."""
    from rlhf_cli.commands.offline import OfflineTask, offline_model
    from rlhf_cli.commands.pair_items import load_pair_items
    from rlhf_cli.commands.run_identity import objective_identity
    from rlhf_cli.models.classifiers import padding_token, refuse_several_labels
    from rlhf_cli.models.loading import load_value_backbone
    from rlhf_cli.models.policy import ValueModel
    from rlhf_cli.trainers.rm import RewardObjective, finish_reward_metrics

    loss = config.reward
    model = offline_model(config)
    refuse_several_labels(model.architecture, f"--pretrain {model.base.pretrain!r}")
    items, summary = load_pair_items(
        config, model, share_prompts=loss.share_prompts, read_ends=True, with_margin=loss.margin_loss
    )
    if padding_token(model.tokenizer, model.architecture) is None:
        summary += "; no token is free for padding: transformers will score one sequence at a time"
    return OfflineTask(
        command="rm",
        objective=RewardObjective(loss.loss, loss.margin_loss, loss.center_rewards_coefficient),
        items=items,
        summary=summary,
        model=model,
        load=load_value_backbone,
        wrap=ValueModel,
        finish_metrics=finish_reward_metrics,
        identity=lambda: objective_identity(loss),
        describe=reward_statistics,
    )


def reward_statistics(evaluated: dict[str, float]) -> dict[str, Any]:
    """What the model's configuration says of its rewards on the evaluation data, for `--normalize_reward`.

    Without such data None: the model that training began with may have said something of its own.
    """
    return {f"reward_{name}": evaluated.get(key) for name, key in (("mean", "reward"), ("std", "reward_std"))}
