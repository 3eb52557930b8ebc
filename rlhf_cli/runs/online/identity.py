"""The identity of an online run, which must be equal for a checkpoint to be continued."""

from pathlib import Path

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.config.commands.online import FilteringConfig, OwnResponsesConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.models.vision.freezing import frozen_parts_identity
from rlhf_cli.runs.online.models import OnlineModels
from rlhf_cli.runs.run_identity import adapter_identity, model_identity, objective_identity, tokenizer_identity

ENGINES = {"rollout_backend", "enable_prefix_caching", "enforce_eager"}
LENGTH = {"num_episodes", "max_iterations"}
"""Settings of the length of a run, which its number of iterations stands for."""
HOW_ENGINES_RUN = frozenset(ENGINES | LENGTH | {name for name in RolloutConfig.model_fields if "vllm_" in name})
HOW_REWARDS_RUN = frozenset(
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
    }
)
"""Settings of rewards that change how they are computed or where their files are, and not their values."""


def online_identity(
    config: OwnResponsesConfig,
    models: OnlineModels,
    data: PromptData,
    *,
    command: str,
    estimator: Estimator,
    iterations: int,
) -> dict[str, object]:
    """Return the facts that must be equal for a checkpoint to be continued, as JSON.

    The settings of the objective are part of it; the number of passes over an iteration's responses is not.
    """
    return {
        "command": command,
        "algorithm": estimator.name,
        "param_dtype": config.model.param_dtype,
        **_roles(models),
        **tokenizer_identity(models.policy.tokenizer),
        "number of prompts": len(data.prompts),
        "contents of the prompts": data.fingerprint,
        **settings_identity(config),
        "iterations": iterations,
    }


def settings_identity(config: OwnResponsesConfig) -> dict[str, object]:
    """Return the settings of the objective, of the optimizer and of sampling, by their names in a checkpoint."""
    return {
        **objective_identity(config.rollout, besides=HOW_ENGINES_RUN),
        "train_batch_size": config.batch.train_batch_size,
        **config.optim.kept(),
        "aux_loss_coef": config.optim.aux_loss_coef,
        **objective_identity(
            config.policy_settings, besides=frozenset({"advantage_estimator"})
        ),  # the estimator has its name
        **_rewards(config),
        **config.episode_settings.identity(max_len=config.prompts.max_len),
        **config.reference_settings.model_dump(mode="json"),
        **objective_identity(
            config.teacher_settings, besides=frozenset({"teacher_pretrain"})
        ),  # the teacher has hashes
        **_filtering(config),
        "max_staleness": config.lag,
        "seed": config.batch.seed,
    }


def _roles(models: OnlineModels) -> dict[str, object]:
    policy, critic = models.policy, models.critic
    roles = {
        **model_identity("policy", policy.found, policy.plan),
        **adapter_identity(policy.plan),
        **frozen_parts_identity(policy.base),
        **model_identity("reward model", models.reward.found if models.reward else None),
        **model_identity("teacher", models.teacher.found if models.teacher else None),
    }
    if critic is None:
        return roles
    return {
        **roles,
        **model_identity("critic", critic.found, critic.plan),
        **adapter_identity(critic.plan, suffix=" of the critic"),
    }


def _rewards(config: OwnResponsesConfig) -> dict[str, object]:
    reward = config.reward
    return {
        **objective_identity(reward, besides=HOW_REWARDS_RUN | config.unsupported_in("reward")),
        "reward_func": Path(reward.reward_func).name if reward.reward_func else None,
        "reward servers": bool(reward.remote_rm_url),
    }


def _filtering(config: OwnResponsesConfig) -> dict[str, object]:
    """Return which groups count; the number of prompts that are asked for them is not part of it."""
    if not isinstance(config, FilteringConfig):
        return {}
    names = {"dynamic_filtering", "dynamic_filtering_reward_range"}
    return config.dynamic.model_dump(mode="json", include=names)
