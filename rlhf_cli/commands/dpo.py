"""`rlhf dpo`: preference optimisation on pairs.

Leaves out losses (algorithms/), the objective (trainers/) and everything heavy: importing this module costs settings
only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rlhf_cli.commands.ranks import begin_ranks
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.model import AdapterConfig, ModelConfig
from rlhf_cli.config.preference import PairLossConfig, ReferenceConfig
from rlhf_cli.config.presets import defaults_of_pair_loss
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
    from rlhf_cli.trainers.dpo import DPOObjective


class DPOConfig(BaseModel):
    """Settings of `rlhf dpo`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    data: PreferenceDataConfig
    preference: PairLossConfig = PairLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    batch: OfflineBatchConfig = OfflineBatchConfig()
    optim: SingleOptimConfig = SingleOptimConfig(learning_rate=5e-7)
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given."""
        return defaults_of_pair_loss(given)


def dpo(config: DPOConfig) -> None:
    """Train a language model to prefer the chosen of two responses: DPO and its relatives."""
    begin_ranks(config.checkpoint, config.launch, config.tracking)

    from rlhf_cli.commands.offline import run_offline

    run_offline(config, dpo_task(config))


def dpo_task(config: DPOConfig) -> "OfflineTask":
    """Return the task of these settings, its data read. Raise UsageError for what can be found wrong with them."""
    from rlhf_cli.commands.offline import OfflineTask, offline_model
    from rlhf_cli.commands.pair_items import load_pair_items
    from rlhf_cli.commands.references import check_reference, pair_reference, reference_identity
    from rlhf_cli.commands.run_identity import objective_identity
    from rlhf_cli.models.adapters import require_language_model
    from rlhf_cli.models.loading import load_causal_lm
    from rlhf_cli.models.policy import PolicyModel

    objective = make_objective(config.preference)
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    check_reference(config.reference, model, config.deepspeed, is_needed=objective.needs_reference)
    items, summary = load_pair_items(config, model, share_prompts=config.preference.share_prompts, read_ends=False)
    return OfflineTask(
        command="dpo",
        objective=objective,
        items=items,
        summary=summary,
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
        identity=lambda: {
            **objective_identity(config.preference),
            **reference_identity(config.reference, model, is_needed=objective.needs_reference),
        },
        begin=lambda items, share: pair_reference(
            config.reference, objective, items, share, model=model, deepspeed=config.deepspeed
        ),
    )


def make_objective(loss: PairLossConfig) -> "DPOObjective":
    """The objective of these settings. UsageError for a setting that none of the losses reads."""
    from rlhf_cli.algorithms.preference import PreferenceSettings, preference_losses
    from rlhf_cli.errors import UsageError
    from rlhf_cli.trainers.dpo import DPOObjective

    read = {name for row in preference_losses(loss.loss) for name in row.settings}
    names = ("beta", "label_smoothing", "simpo_gamma", "discopop_tau", "orpo_lambda")
    given: dict[str, Any] = {name: getattr(loss, name) for name in names}
    defaults = PairLossConfig()
    for name, value in given.items():
        if name not in read and value != getattr(defaults, name):
            raise UsageError(f"{name} {value} changes nothing in loss {','.join(loss.loss)}: leave it away")
    weights = tuple(loss.loss_weights or [1.0] * len(loss.loss))
    return DPOObjective(tuple(loss.loss), weights, PreferenceSettings(**given), loss.nll_loss_coef)
