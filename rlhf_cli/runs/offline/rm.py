"""Task definition for `rlhf rm`: data, model and objective."""

from rlhf_cli.commands.rm import RMConfig
from rlhf_cli.models.classifiers import padding_token, refuse_several_labels
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.runs.offline.pair_items import load_pair_items
from rlhf_cli.runs.offline.task import OfflineTask, offline_model
from rlhf_cli.runs.run_identity import objective_identity
from rlhf_cli.trainers.offline.rm import RewardObjective, finish_reward_metrics


def rm_task(config: RMConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, model or data conflict."""
    loss = config.reward
    model = offline_model(config)
    refuse_several_labels(model.architecture, f"--pretrain {model.base.pretrain!r}")
    items, summary = load_pair_items(config, model, read_ends=True, with_margin=loss.margin_loss)
    # transformers needs padding to score a batch.
    if padding_token(model.tokenizer, model.architecture) is None:
        summary += "; no padding token available, so transformers scores one sequence at a time"
    return OfflineTask(
        command=config.command,
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


def reward_statistics(evaluated: dict[str, float]) -> dict[str, object]:
    """Return the mean and std of evaluation rewards for the model configuration (`--normalize_reward`).

    Without evaluation data both are None, which removes statistics inherited from the initial model.
    """
    return {f"reward_{name}": evaluated.get(key) for name, key in (("mean", "reward"), ("std", "reward_std"))}
