"""Whether the sizes of an online command fit together, seen from its settings and the row of its estimator.

Imports no torch at module level, so that what the settings show is checked before anything heavy is loaded.
"""

import math

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.algorithms.estimators.gae import bootstraps
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.config.commands.online import OnlineConfig
from rlhf_cli.config.online import OnlineBatchConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import UsageError

OF_ONE_TURN = "is about one response of at most max_new_tokens, and an episode has several turns"
"""End of a sentence about a setting that episodes do not have."""


def check_without_estimator(config: OnlineConfig) -> None:
    """Raise UsageError if settings do not go together whatever the estimator."""
    _check_steps(config.rollout, config.batch)
    _check_room(config)
    check_filtering(config)
    check_episodes(config)
    check_lag(config)
    if config.reference.ref_sync_steps and not config.policy.init_kl_coef:
        raise UsageError("--ref_sync_steps: without --init_kl_coef there is no reference that could move")


def check_batches(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if sizes do not fit together; the message names sizes that would."""
    _check_steps(config.rollout, config.batch)
    _check_groups(config, estimator)
    _check_shaping(config, estimator)
    _check_room(config)


def _check_steps(rollout: RolloutConfig, batch: OnlineBatchConfig) -> None:
    """Raise UsageError if the responses of an iteration are no whole number of optimizer steps."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if samples % batch.train_batch_size == 0:
        return
    fitting = [size for size in range(1, samples + 1) if samples % size == 0]
    below = max((size for size in fitting if size < batch.train_batch_size), default=fitting[0])
    above = min((size for size in fitting if size > batch.train_batch_size), default=samples)
    raise UsageError(
        f"--train_batch_size {batch.train_batch_size} does not divide the {samples} responses of an iteration "
        f"({rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt}); "
        f"{' and '.join(map(str, sorted({below, above})))} would"
    )


def _check_groups(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if too few responses to a prompt are sampled to be compared."""
    num_samples = config.rollout.n_samples_per_prompt
    if num_samples < estimator.min_group:
        raise UsageError(
            f"--n_samples_per_prompt {num_samples}: {estimator.name} compares the responses of a "
            f"prompt and needs at least {estimator.min_group}"
        )
    if num_samples == 1 and any(call.name == "length" for call in config.reward.rewards):
        raise UsageError("--reward_funcs length compares the responses of a prompt: raise --n_samples_per_prompt")


def _check_shaping(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if scores cannot be shaped by the length of responses as the settings request."""
    reward, longest = config.reward, config.rollout.max_new_tokens
    buffer = reward.overlong_buffer_len
    if buffer is not None and any(call.name == "soft_overlong" for call in reward.rewards):
        raise UsageError("--reward_funcs soft_overlong and --overlong_buffer_len punish length twice: give one of them")
    shaping = ("overlong_buffer_len", "stop_properly_penalty_coef")
    given = next((name for name in shaping if getattr(reward, name) is not None), None)
    if given and estimator.rewards_apart:
        raise UsageError(f"--{given} changes the sum of the rewards, which {estimator.name} compares one by one")
    if buffer is not None and buffer > longest:
        raise UsageError(f"--overlong_buffer_len {buffer} is longer than a response may be: --max_new_tokens {longest}")


def _check_room(config: OnlineConfig) -> None:
    """Raise UsageError if a micro-batch cannot hold the longest sequence."""
    batch, ranks = config.batch, min(config.deepspeed.sequence_sizes)
    room = f"--train_max_tokens_per_gpu {batch.max_tokens}" + (f" on {ranks} ranks" if ranks > 1 else "")
    max_tokens, max_len = batch.max_tokens * ranks, config.prompts.max_len
    if bootstraps(config.policy) and max_tokens == max_len:
        raise UsageError(f"--bootstrap_truncated reads one more token than --max_len {max_len}: raise {room}")
    if max_tokens < max_len:
        raise UsageError(f"{room} cannot hold one sequence of --max_len {max_len}: raise the one or lower the other")


def check_filtering(config: OnlineConfig) -> None:
    """Raise UsageError if dynamic sampling has no score to judge prompts by."""
    if config.dynamic_sampling is None:
        return
    if config.rollout.n_samples_per_prompt < 2:
        raise UsageError(
            "--dynamic_filtering compares the responses of a prompt: --n_samples_per_prompt has to be at least 2"
        )
    reward = config.reward
    if not reward.reward_funcs and reward.reward_func is None and not reward.remote_rm_url:
        raise UsageError(
            "--dynamic_filtering judges responses while others are generated, which a reward model cannot do: give "
            "--reward_funcs, --reward_func or --remote_rm_url besides --reward_pretrain"
        )


def check_step_rewards(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if the estimator has no place for rewards of steps."""
    if config.reward.prm_pretrain is None:
        return
    if estimator.steps is None:
        names = ", ".join(row.name for row in ESTIMATORS.values() if row.steps is not None)
        raise UsageError(f"--prm_pretrain: {estimator.name} compares whole responses; rewards of steps go with {names}")


def check_episodes(config: OnlineConfig) -> None:
    """Raise UsageError for settings that do not go with episodes of several turns."""
    if not config.episodes.plays_episodes:
        return
    if config.reward.prm_pretrain is not None:
        raise UsageError(
            "--prm_pretrain: the steps of a response with observations of an environment are not found yet"
        )
    if config.reward.overlong_buffer_len is not None:
        raise UsageError(f"--overlong_buffer_len {OF_ONE_TURN}")
    refuse_length_rewards(config.reward)


def refuse_length_rewards(reward: RewardConfig) -> None:
    """Raise UsageError for a reward by the length of one response."""
    for call in reward.rewards:
        if call.row.kind == "length":
            raise UsageError(f"--reward_funcs {call.name} {OF_ONE_TURN}")


def check_lag(config: OnlineConfig) -> None:
    """Raise UsageError if engines cannot sample while the models train, because they share GPUs with them."""
    placement = config.placement
    named = (
        ("--colocate_all_models", placement.colocate_all_models),
        ("--vllm_enable_sleep", config.rollout.vllm_enable_sleep),
    )
    for flag, is_given in named:
        if config.asynchronous.lag and is_given:
            raise UsageError(
                f"--async_train samples while the models train, so that engines need GPUs of their own: drop {flag}"
            )


def check_partial_rollout(config: OnlineConfig, *, backend: str) -> None:
    """Raise UsageError if the engines cannot take weights in the middle of a response."""
    if config.asynchronous.partial_rollout and backend != "vllm":
        raise UsageError(
            f"--partial_rollout needs vLLM, which takes weights in the middle of responses; {backend} takes them "
            "between batches"
        )


def lag_notice(config: OnlineConfig) -> list[str]:
    """Return a line if responses of older policies are trained on without a correction."""
    if not config.asynchronous.lag or config.policy.rollout_correction != "off":
        return []
    return [
        "--rollout_correction off: with --async_train responses of older policies count as if the present policy had "
        "written them"
    ]


def most_episodes(config: OnlineConfig, *, num_prompts: int) -> int:
    """Return the largest number of episodes that are played at the same time."""
    rollout, dynamic = config.rollout, config.dynamic_sampling
    share = 0.0 if dynamic is None else dynamic.dynamic_oversample
    return min(math.ceil(rollout.rollout_batch_size * (1 + share)), num_prompts) * rollout.n_samples_per_prompt
