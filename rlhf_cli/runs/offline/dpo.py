"""Task definition for `rlhf dpo`: data, model, reference and objective."""

from dataclasses import fields
from typing import Any

from rlhf_cli.algorithms.preference import PreferenceSettings, preference_losses
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.config.preference import PairLossConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.frozen_reference import (
    check_reference,
    pair_reference,
    reference_identity,
    reference_notices,
)
from rlhf_cli.runs.offline.pair_items import load_pair_items
from rlhf_cli.runs.offline.task import OfflineTask, offline_model
from rlhf_cli.runs.run_identity import objective_identity
from rlhf_cli.trainers.offline.dpo import DPOObjective


def dpo_task(config: DPOConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    objective = make_objective(config.preference)
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    check_reference(config.reference, model, is_needed=objective.needs_reference)
    items, summary = load_pair_items(config, model, read_ends=False)
    return OfflineTask(
        command=config.command,
        objective=objective,
        items=items,
        summary=summary,
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
        notices=reference_notices(config.reference, model) if objective.needs_reference else (),
        identity=lambda: {
            **objective_identity(config.preference),
            **reference_identity(config.reference, model, is_needed=objective.needs_reference),
            **config.reference.model_dump(include={"ref_sync_steps", "ref_mixup_alpha"}),
        },
        begin=lambda items, share: pair_reference(
            config.reference, objective, items, share, model=model, deepspeed=config.deepspeed
        ),
    )


def make_objective(loss: PairLossConfig) -> DPOObjective:
    """Return the objective for these settings. Raises UsageError for a setting that no selected loss uses."""
    # A setting without effect is probably a mistake, such as beta for a loss that has none.
    read = {name for row in preference_losses(loss.loss) for name in row.settings}
    given: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(PreferenceSettings)}
    defaults = PairLossConfig()
    for name, value in given.items():
        if name not in read and value != getattr(defaults, name):
            raise UsageError(f"{name} {value} has no effect on loss {','.join(loss.loss)}: remove it")
    weights = tuple(loss.loss_weights or [1.0] * len(loss.loss))
    return DPOObjective(
        tuple(loss.loss),
        weights,
        PreferenceSettings(**given),
        nll_loss_coef=loss.nll_loss_coef,
        use_weighting=loss.use_weighting,
        ld_alpha=loss.ld_alpha,
    )
