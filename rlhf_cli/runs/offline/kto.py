"""Task definition for `rlhf kto`: data, model, reference and objective."""

from rlhf_cli.algorithms.kto import UnpairedSettings, balanced_weights, finish_kto_metrics
from rlhf_cli.commands.kto import KTOConfig
from rlhf_cli.config.preference import UnpairedLossConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.preference_data import RESPONSES, LabelledItem
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.runs.offline.frozen_reference import (
    check_reference,
    labelled_reference,
    reference_identity,
    reference_notices,
)
from rlhf_cli.runs.offline.task import OfflineTask, load_items, offline_model
from rlhf_cli.runs.run_identity import objective_identity
from rlhf_cli.trainers.offline.kto import KTOObjective, LabelledItems, partners_of


def kto_task(config: KTOConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    loss = config.preference
    settings = UnpairedSettings(loss.beta, loss.desirable_loss_weight, loss.undesirable_loss_weight)
    objective = KTOObjective(loss.loss, settings)
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    check_reference(config.reference, model, is_needed=True)

    def paired(data: LoadedData[LabelledItem]) -> LabelledItems:
        return LabelledItems(data, partners_of(data), {})

    items = load_items(config, RESPONSES, config.data, model, paired)
    train = items.data.data
    return OfflineTask(
        command=config.command,
        objective=objective,
        items=items,
        summary=f"{train.report.summary}; {_balance(train, loss)}",
        model=model,
        load=load_causal_lm,
        wrap=PolicyModel,
        notices=reference_notices(config.reference, model),
        finish_metrics=finish_kto_metrics,
        identity=lambda: objective_identity(loss) | reference_identity(config.reference, model),
        begin=lambda items, share: labelled_reference(
            config.reference, objective, items, share, model=model, deepspeed=config.deepspeed
        ),
    )


def _balance(data: LoadedData[LabelledItem], loss: UnpairedLossConfig) -> str:
    """Summarize the class balance, with suggested weights if unbalanced. Raises UsageError if a class is missing."""
    # Fail early: with one class only, the loss pushes all responses in one direction.
    num_desirable = int(data.columns["desirable"].sum())
    num_undesirable = len(data.items) - num_desirable
    try:
        least, greatest = balanced_weights(num_desirable, num_undesirable)
    except ValueError as error:
        raise UsageError(str(error)) from error
    rows = f"{num_desirable:,} desirable, {num_undesirable:,} undesirable"
    weight = loss.undesirable_loss_weight
    if weight > 0 and least <= loss.desirable_loss_weight / weight <= greatest:
        return rows
    return f"{rows}: with --undesirable_loss_weight 1 --desirable_loss_weight {least:.3g} to {greatest:.3g} balances"
