"""Converts batch sizes and steps from other frameworks to those in `rlhf`.

`rlhf` counts prompts per iteration in `rollout_batch_size`, and responses per optimizer step over all GPUs in
`train_batch_size`; offline, rows per optimizer step. Learning-rate warm-up counts optimizer steps; all other steps in
online commands are iterations.

- verl and EasyR1 count prompts everywhere, and multiply the mini-batch by the responses per prompt.
- TRL counts responses on one process, times processes, times accumulated batches. It counts optimizer steps.
- prime-rl counts responses per step, which has one optimizer step.
"""

from math import ceil

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.foreign.call import Call, Meaning, Refused, Settings, integer

_RESPONSES = ("actor_rollout_ref.rollout.n", "worker.rollout.n", "n_samples_per_prompt")
_PROMPTS = ("data.train_batch_size", "data.rollout_batch_size", "rollout_batch_size")
_MINI_BATCH = ("actor_rollout_ref.actor.ppo_mini_batch_size", "worker.actor.global_batch_size")
_EPOCHS = ("actor_rollout_ref.actor.ppo_epochs", "worker.actor.ppo_epochs", "max_epochs")


def mini_batch(values: list[str], call: Call) -> Settings:
    """Translate verl's prompts per optimizer step: 256 prompts with 5 responses each are 1,280 responses."""
    return {"train_batch_size": [str(integer(values[0], _MINI_BATCH[0]) * call.whole(*_RESPONSES, default=1))]}


def critic_batch(values: list[str], call: Call) -> Settings | None:
    """Translate verl's mini-batch for the critic, in prompts, to optimizer steps per pass over the responses."""
    own = integer(values[0], "critic.ppo_mini_batch_size")
    if own == call.whole(*_MINI_BATCH, default=own):
        return None
    return {"critic_update_steps": [str(ceil(call.whole(*_PROMPTS) / own))]}


def critic_epochs(values: list[str], call: Call) -> None:
    """Accept the critic's passes over the responses in verl if they equal the actor's."""
    if call.command == "ppo" and integer(values[0], "critic.ppo_epochs") != call.whole(*_EPOCHS, default=1):
        raise Refused("actor and critic pass over the responses equally often: --max_epochs")


def warmup_steps(values: list[str], call: Call) -> Settings | None:
    """Translate optimizer steps of warm-up in verl's supervised trainer; below 0, the ratio applies."""
    return None if values[0].startswith("-") else {"warmup_steps": values}


def _verl_steps(call: Call) -> int:
    """Return the optimizer steps per iteration in verl."""
    prompts = call.whole(*_PROMPTS)
    return ceil(prompts / call.whole(*_MINI_BATCH, default=prompts)) * call.whole(*_EPOCHS, default=1)


def verl_warmup(values: list[str], call: Call) -> Settings | None:
    """Translate verl's warm-up, in iterations because its schedule advances once per iteration, to optimizer steps."""
    steps = integer(values[0], "lr_warmup_steps")
    return None if steps <= 0 else {"warmup_steps": [str(steps * _verl_steps(call))]}


def verl_warmup_share(values: list[str], call: Call) -> Settings | None:
    """Translate verl's warm-up ratio, which applies only without `lr_warmup_steps`."""
    names = ("actor_rollout_ref.actor.optim.lr_warmup_steps", "worker.actor.optim.lr_warmup_steps")
    given = call.value(*names, "optim.lr_warmup_steps")
    return {"lr_warmup_ratio": values} if given is None or given.startswith("-") or given == "0" else None


def oversampled(values: list[str], call: Call) -> Settings | None:
    """Translate `data.gen_batch_size` in DAPO, prompts per round, to a fraction of extra prompts."""
    if not call.is_on("algorithm.filter_groups.enable", "algorithm.online_filtering"):
        return None
    prompts = call.whole(*_PROMPTS)
    return {"dynamic_oversample": [f"{max(0.0, integer(values[0], 'data.gen_batch_size') / prompts - 1):g}"]}


_EACH, _ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
_PROCESSES = ("world_size", "num_processes")
"""Number of TRL processes on all nodes, or on a single node."""


def _is_whole(call: Call) -> bool:
    """Return whether the number of processes is known, which determines global batch sizes."""
    return call.value(*_PROCESSES) is not None


def _trl_step(call: Call) -> int:
    """Return the responses, or rows, per optimizer step in TRL."""
    return call.whole(_EACH, default=8) * call.whole(*_PROCESSES) * call.whole(_ACCUMULATED, default=1)


def _trl_generated(call: Call) -> int:
    """Return the responses per generation in TRL, which is one iteration."""
    if "generation_batch_size" in call.values:
        return call.whole("generation_batch_size")
    batches = call.whole("steps_per_generation", _ACCUMULATED, default=1)
    return call.whole(_EACH, default=8) * call.whole(*_PROCESSES) * batches


def device_batch(values: list[str], call: Call) -> Settings:
    """Translate TRL's batch per process, to global batch sizes if the number of processes is known."""
    if not _is_whole(call):
        return {"micro_train_batch_size": values}
    sizes = {"train_batch_size": [str(_trl_step(call))]}
    if call.command not in ONLINE_TRAINING:
        return sizes
    generated, each = (
        _trl_generated(call),
        call.whole("num_generations", "n_samples_per_prompt", default=1 if call.command == "gkd" else 8),
    )
    if generated % each:
        raise Refused(f"{generated} responses per generation are not a multiple of {each} responses per prompt")
    return sizes | {"rollout_batch_size": [str(generated // each)]}


def accumulation(values: list[str], call: Call) -> None:
    """Accept gradient accumulation if `device_batch` can compute the global batch."""
    if not _is_whole(call):
        raise Refused("use --train_batch_size, the responses per optimizer step; or add --num_processes")


def trl_iterations(name: str) -> Meaning:
    """Return a function that converts optimizer steps in TRL to iterations, for the setting `name`."""

    def translate(values: list[str], call: Call) -> Settings:
        steps = float(values[0])
        # Below 1, transformers takes a share of all steps.
        if call.command not in ONLINE_TRAINING or steps < 1:
            return {name: values}
        batches = call.whole("steps_per_generation", _ACCUMULATED, default=1) / call.whole(_ACCUMULATED, default=1)
        if "generation_batch_size" in call.values:
            batches = _trl_generated(call) / _trl_step(call)
        each = batches * call.whole("num_iterations", "max_epochs", default=1)
        return {name: [str(max(1, ceil(steps / each)))]}

    return translate


def max_steps(values: list[str], call: Call) -> Settings | None:
    """Translate the maximum number of steps in TRL, verl and prime-rl; -1 means unlimited."""
    if values[0].startswith("-"):
        return None
    return trl_iterations("max_iterations" if call.command in ONLINE_TRAINING else "max_steps")(values, call)


def prime_batch(values: list[str], call: Call) -> Settings:
    """Translate prime-rl's responses per step."""
    responses = integer(values[0], "orchestrator.batch_size")
    each = call.whole("orchestrator.group_size", "orchestrator.rollouts_per_example", default=1)
    if responses % each:
        raise Refused(f"{responses} responses per step are not a multiple of {each} responses per prompt")
    return {"train_batch_size": [str(responses)], "rollout_batch_size": [str(responses // each)]}


def verl_length(values: list[str], call: Call) -> Settings:
    """Translate separate limits for prompt and response, as in verl and TRL, to the sum."""
    if call.values.keys() & {"max_length", "max_seq_length"}:
        raise Refused("--max_len, from max_length, limits prompt plus response")
    prompt = integer(values[0], "max_prompt_length")
    return {"max_len": [str(prompt + call.whole("data.max_response_length", "max_completion_length", default=512))]}


def verl_prompts(values: list[str], call: Call) -> Settings:
    """Translate verl's prompts per iteration; in its supervised trainer, rows per optimizer step."""
    return {"rollout_batch_size" if call.command in ONLINE_TRAINING else "train_batch_size": values}


def prime_length(values: list[str], call: Call) -> Settings:
    """Translate the sequence length in prime-rl; online, the orchestrator's value applies."""
    return {"max_len": [call.value("orchestrator.seq_len", "seq_len") or values[0]]}
