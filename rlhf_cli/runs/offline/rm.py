"""The task of `rlhf rm`: its data, model and objective."""

from rlhf_cli.config.commands.rm import RMConfig
from rlhf_cli.models.classifiers import padding_token, refuse_several_labels
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.runs.offline.pair_items import load_pair_items
from rlhf_cli.runs.offline.task import OfflineTask, offline_model
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.run_identity import objective_identity
from rlhf_cli.trainers.offline.rm import RewardObjective, finish_reward_metrics


def rm_task(config: RMConfig) -> OfflineTask:
    """Read the data and return the task of these settings. Raise UsageError if settings, model or data do not fit."""
    loss = config.reward
    model = offline_model(config)
    refuse_several_labels(model.architecture, f"--pretrain {model.base.pretrain!r}")
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)
    items, summary = load_pair_items(
        config, model, share_prompts=loss.share_prompts, read_ends=True, with_margin=loss.margin_loss, reader=reader
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


def reward_statistics(evaluated: dict[str, float]) -> dict[str, object]:
    """Return mean and std of the rewards on the evaluation data for the model's configuration (`--normalize_reward`).

    Without evaluation data both are None: they replace statistics of the model that training began with.
    """
    return {f"reward_{name}": evaluated.get(key) for name, key in (("mean", "reward"), ("std", "reward_std"))}
