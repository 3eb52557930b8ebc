"""Online run identity: facts that must match to resume a checkpoint."""

from pathlib import Path

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.models.vision.freezing import frozen_parts_identity
from rlhf_cli.runs.online.models import OnlineModels
from rlhf_cli.runs.reward_file import JUDGE_TEMPLATE, judge_template_hash
from rlhf_cli.runs.run_identity import (
    NOT_OF_THE_STEPS,
    adapter_identity,
    model_identity,
    objective_identity,
    supported_identity,
    teachers_identity,
    tokenizer_identity,
)

_LENGTH = {"num_episodes", "max_iterations"}
"""Run-length settings, represented by the number of iterations."""
_HOW_REWARDS_RUN = frozenset(
    {
        "reward_func",
        "reward_pretrain",
        "prm_pretrain",
        "reward_timeout",
        "reward_retries",
        "reward_num_workers",
        "reward_max_failures",
        "code_unsandboxed",
        "remote_rm_url",
        "remote_rm_timeout",
        "remote_rm_batch_size",
        "remote_rm_api_key_env",
        "judge",
        "judge_num_engines",
        "judge_tensor_parallel_size",
        "judge_template",
        "judge_timeout",
        "judge_concurrency",
        "judge_cache",
        "judge_api_key_env",
    }
)
"""Reward settings that affect execution or file locations, but not values."""
HOW_ROLES_RUN = {"ref_offload", "teacher_by_source", "critic_update_steps", "freezing_actor_steps"}
"""Settings of roles that may change on resume, besides their sizes and stages. Models are identified by hashes."""
_HOW_PROMPTS_ARE_REPLACED = {"dynamic_oversample", "dynamic_max_rounds"}
"""Dynamic-sampling settings that do not affect which groups pass the filter."""


def online_identity(
    config: OnlineConfig,
    models: OnlineModels,
    data: PromptData,
    *,
    estimator: Estimator,
    iterations: int,
) -> dict[str, object]:
    """Return the facts that must match to resume a checkpoint, as JSON values.

    Includes the objective's settings, but not the number of epochs per iteration.
    """
    return {
        # The command is recorded separately, because several commands share an estimator.
        "command": config.command,
        "algorithm": estimator.name,
        "param_dtype": config.model.param_dtype,
        **_roles(config, models),
        **tokenizer_identity(models.policy.tokenizer),
        "number of prompts": len(data.prompts),
        "contents of the prompts": data.fingerprint,
        **settings_identity(config),
        "iterations": iterations,
    }


def settings_identity(config: OnlineConfig) -> dict[str, object]:
    """Return the settings of objective, optimizer and sampling, keyed by checkpoint name."""
    own = config.settings_of_code("advantage_estimator")
    return {
        **supported_identity(config, "rollout", besides=_LENGTH),
        "train_batch_size": config.batch.train_batch_size,
        **supported_identity(config, "optim", besides=NOT_OF_THE_STEPS),
        **supported_identity(config, "policy", besides={"advantage_estimator"}),  # identified by its name
        **(objective_identity(own) if own is not None else {}),
        **_rewards(config),
        **config.episodes.identity(max_len=config.prompts.max_len),
        **_role_settings(config),
        **supported_identity(config, "dynamic", besides=_HOW_PROMPTS_ARE_REPLACED),
        "max_staleness": config.asynchronous.staleness,
        "seed": config.batch.seed,
    }


def _role_settings(config: OnlineConfig) -> dict[str, object]:
    """Return the settings of all roles that affect their results."""
    roles = config.roles.values()
    # Models are identified by hashes.
    besides = {name for role in roles for name in (*role.rank_settings, role.pretrain)} | HOW_ROLES_RUN
    groups = [role.group for role in roles if role.group != "placement" and role.group in type(config).model_fields]
    return {
        name: value for group in groups for name, value in supported_identity(config, group, besides=besides).items()
    }


def _roles(config: OnlineConfig, models: OnlineModels) -> dict[str, object]:
    """Return the facts about the model of each role with a title; frozen ones are recorded where there is none too."""
    facts = frozen_parts_identity(models.policy.base)
    for name, trained in models.trained.items():
        title = config.roles[name].title
        suffix = "" if name == "actor" else f" of the {title}"
        facts |= model_identity(title, trained.found, trained.plan)
        facts |= adapter_identity(trained.plan, suffix=suffix)
    # Record absent models as None, so that adding one on resume is an error.
    for name, role in config.roles.items():
        if role.title and not role.is_trained:
            model = models.loaded.get(name)
            facts |= model_identity(role.title, model.found if model else None)
    facts |= model_identity("judge", models.judge.found if models.judge else None)
    return facts | teachers_identity(config, models.teachers)


def _rewards(config: OnlineConfig) -> dict[str, object]:
    reward = config.reward
    return {
        **supported_identity(config, "reward", besides=_HOW_REWARDS_RUN),
        # Only the name: the file may move between machines, and changed contents are reported as a notice.
        "reward_func": Path(reward.reward_func).name if reward.reward_func else None,
        "reward servers": bool(reward.remote_rm_url),
        "judges": bool(reward.judge),
        JUDGE_TEMPLATE: judge_template_hash(reward),
    }
