"""Consistency checks for the sizes and settings in an online command.

No module-level import of torch: these checks run before anything heavy is loaded.
"""

import math

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.presets import PRESETS
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.errors import UsageError, listed

_OF_ONE_TURN = "applies to a single response, but an episode has multiple turns"
"""Second half of error messages for settings that do not support episodes."""


def check_settings(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if settings conflict, as far as this is known without loading a model."""
    check_batches(config, estimator)
    check_step_rewards(config, estimator)
    check_selection(config)
    check_episodes(config)
    check_staleness(config)
    _check_estimator_settings(config)
    if config.reference.ref_sync_steps and not config.policy.init_kl_coef:
        raise UsageError("--ref_sync_steps: requires a reference model; set --init_kl_coef")


def _check_estimator_settings(config: OnlineConfig) -> None:
    """Raise UsageError if a setting of the command's estimator is given, but the user's estimator has its own."""
    if config.settings_of_code("advantage_estimator") is None:
        return
    policy = config.policy
    # A preset also sets the loss, so it is allowed with the settings that it implies.
    by_preset = {"preset", *PRESETS.get(getattr(policy, "preset", None) or "", {})}
    own = (name for name in type(policy).model_fields if name not in {*PolicyConfig.model_fields, *by_preset})
    if given := policy.changed(*own):
        raise UsageError(
            f"--{given}: --advantage_estimator {policy.advantage_estimator} reads its own settings instead"
        )


def check_batches(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if sizes are inconsistent. The message suggests valid sizes."""
    _check_steps(config.rollout, config.batch)
    _check_groups(config, estimator)
    _check_shaping(config, estimator)
    _check_room(config)


def _check_steps(rollout: RolloutConfig, batch: BatchConfig) -> None:
    """Raise UsageError if the responses per iteration do not divide into whole optimizer steps."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if samples % batch.train_batch_size == 0:
        return
    # Suggest neighbors, because users usually want a similar size.
    fitting = [size for size in range(1, samples + 1) if samples % size == 0]
    below = max((size for size in fitting if size < batch.train_batch_size), default=fitting[0])
    above = min((size for size in fitting if size > batch.train_batch_size), default=samples)
    raise UsageError(
        f"--train_batch_size {batch.train_batch_size} does not divide the {samples} responses per iteration "
        f"({rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt}); "
        f"{' and '.join(map(str, sorted({below, above})))} do"
    )


def _check_groups(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if the groups are too small for the estimator."""
    num_samples = config.rollout.n_samples_per_prompt
    if num_samples < estimator.min_group:
        raise UsageError(
            f"--n_samples_per_prompt {num_samples}: {estimator.name} compares responses to the same "
            f"prompt and requires at least {estimator.min_group}"
        )
    if num_samples == 1 and any(call.name == "length" for call in config.reward.rewards):
        raise UsageError("--reward_funcs length compares responses to the same prompt: raise --n_samples_per_prompt")
    if not config.reward.compares_responses:
        return
    compares = f"--judge_method {config.reward.judge_method} compares responses to the same prompt"
    if num_samples == 1:
        raise UsageError(f"{compares}: raise --n_samples_per_prompt")
    if estimator.greedy:
        raise UsageError(f"{compares}, but {estimator.name} also needs the reward of a single greedy response")
    if config.evaluation.eval_dataset is not None and config.evaluation.eval_n_samples_per_prompt == 1:
        raise UsageError(f"{compares}: raise --eval_n_samples_per_prompt, and set --eval_temperature above 0")


def _check_shaping(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if the settings for length-based score shaping conflict."""
    reward, longest = config.reward, config.rollout.max_new_tokens
    buffer = reward.overlong_buffer_len
    if buffer is not None and any(call.name == "soft_overlong" for call in reward.rewards):
        raise UsageError("--reward_funcs soft_overlong and --overlong_buffer_len both penalize length: use only one")
    shaping = ("overlong_buffer_len", "stop_properly_penalty_coef")
    given = next((name for name in shaping if getattr(reward, name) is not None), None)
    if given and estimator.rewards_apart:
        raise UsageError(f"--{given} changes the summed reward, but {estimator.name} normalizes each reward separately")
    if buffer is not None and buffer > longest:
        raise UsageError(f"--overlong_buffer_len {buffer} exceeds the response limit --max_new_tokens {longest}")


def _check_room(config: OnlineConfig) -> None:
    """Raise UsageError if the longest sequence does not fit in a micro-batch."""
    batch, ranks = config.batch, min(config.sequence_sizes)
    room = f"--train_max_tokens_per_gpu {batch.max_tokens}" + (f" on {ranks} ranks" if ranks > 1 else "")
    max_tokens, max_len = batch.max_tokens * ranks, config.prompts.max_len
    # The value after a truncated response is read at one extra position.
    if config.critic.bootstrap_truncated and max_tokens == max_len:
        raise UsageError(f"--bootstrap_truncated reads one more token than --max_len {max_len}: raise {room}")
    if max_tokens < max_len:
        raise UsageError(f"{room} cannot fit one sequence of --max_len {max_len}: raise the former or lower the latter")


def check_selection(config: OnlineConfig) -> None:
    """Raise UsageError if dynamic sampling or a curriculum has no scores for selecting prompts."""
    is_curriculum = config.rollout.prompt_sampling != "shuffle"
    if config.dynamic_sampling is None and not is_curriculum:
        return
    flag = f"--prompt_sampling {config.rollout.prompt_sampling}" if is_curriculum else "--dynamic_filtering"
    if config.rollout.n_samples_per_prompt < 2:
        raise UsageError(f"{flag} compares responses to the same prompt: set --n_samples_per_prompt to at least 2")
    reward = config.reward
    if not (reward.reward_funcs or reward.reward_func or reward.remote_rm_url or reward.judge):
        raise UsageError(
            f"{flag} selects prompts by scores during generation, which reward models do not support: set "
            "--reward_funcs, --reward_func, --remote_rm_url or --judge in addition to --reward_pretrain"
        )
    if is_curriculum and config.dynamic_sampling is not None:
        raise UsageError(f"{flag} and --dynamic_filtering both select prompts: remove one")
    if is_curriculum and config.asynchronous.staleness:
        raise UsageError(
            f"{flag} needs the rewards of the iteration before, but --async_train samples ahead of it: remove one, or "
            "set --max_staleness 0"
        )


def check_step_rewards(config: OnlineConfig, estimator: Estimator) -> None:
    """Raise UsageError if the estimator does not support step rewards."""
    if config.reward.prm_pretrain is None:
        return
    if estimator.steps is None:
        names = ", ".join(row.name for row in ESTIMATORS.values() if row.steps is not None)
        raise UsageError(f"--prm_pretrain: {estimator.name} uses one reward per response; step rewards: {names}")


def check_episodes(config: OnlineConfig) -> None:
    """Raise UsageError for settings that do not support multi-turn episodes."""
    if not config.episodes.plays_episodes:
        return
    if config.reward.prm_pretrain is not None:
        raise UsageError("--prm_pretrain does not support episodes with an environment yet")
    if config.prompts.teacher_context_key is not None:
        raise UsageError(f"--teacher_context_key {_OF_ONE_TURN}")
    if config.setting("teacher_tokenizer") == "own":
        raise UsageError(f"--teacher_tokenizer own {_OF_ONE_TURN}")
    if config.reward.overlong_buffer_len is not None:
        raise UsageError(f"--overlong_buffer_len {_OF_ONE_TURN}")
    refuse_length_rewards(config.reward)


def refuse_length_rewards(reward: RewardConfig) -> None:
    """Raise UsageError for length rewards."""
    for call in reward.rewards:
        if call.row.kind == "length":
            raise UsageError(f"--reward_funcs {call.name} {_OF_ONE_TURN}")


def check_staleness(config: OnlineConfig) -> None:
    """Raise UsageError if engines cannot sample during training because they share GPUs with the models."""
    placement = config.placement
    named = (
        ("--colocate_all_models", placement.colocate_all_models),
        ("--vllm_enable_sleep", config.engine.vllm_enable_sleep),
    )
    for flag, is_given in named:
        if config.asynchronous.staleness and is_given:
            raise UsageError(f"--async_train samples during training, so engines require dedicated GPUs: drop {flag}")


def check_partial_rollout(config: OnlineConfig, *, backend: str) -> None:
    """Raise UsageError if the engines do not support weight updates during a response."""
    if config.asynchronous.partial_rollout and backend != "vllm":
        raise UsageError(
            f"--partial_rollout requires vLLM, which updates weights during responses; {backend} updates them "
            "between batches"
        )


def correction_notices(config: OnlineConfig) -> list[str]:
    """Return notices if responses from another distribution are trained on without correction."""
    if config.policy.rollout_correction != "off":
        return []
    notices = []
    if config.asynchronous.staleness:
        notices.append("with --async_train, stale responses are treated as if sampled from the current policy")
    if quantized := [name for name in _QUANTIZING if name in config.engine.engine_arguments]:
        notices.append(f"with {listed(quantized)}, the engines sample from another distribution than the policy's")
    return [f"--rollout_correction off: {notice}" for notice in notices]


_QUANTIZING = ("quantization", "kv_cache_dtype")
"""Engine arguments of vLLM that round weights or cached keys and values."""


def most_episodes(config: OnlineConfig, *, num_prompts: int) -> int:
    """Return the maximum number of concurrent episodes."""
    rollout, dynamic = config.rollout, config.dynamic_sampling
    # Oversampled prompts of a round are generated at the same time.
    share = 0.0 if dynamic is None else dynamic.dynamic_oversample
    return min(math.ceil(rollout.rollout_batch_size * (1 + share)), num_prompts) * rollout.n_samples_per_prompt
