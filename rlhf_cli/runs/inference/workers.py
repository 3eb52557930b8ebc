"""Starts and stops the rollout engines and reward model of `generate` and `eval`.

Engines keep their initial weights: at most adapters are pushed, and models do not take turns on the GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rlhf_cli.backends.cluster.placement import Layout, describe, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.start import EnginePlan, Processes, RolePlan, Started
from rlhf_cli.backends.rollout.engine import engine_settings
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig
from rlhf_cli.models.reward_model import RewardModelPlan

REWARD = "reward"


@contextmanager
def started_models(
    config: InferenceConfig,
    backend: str,
    reward_model: RewardModelPlan | None,
    *,
    weights: AbstractContextManager[str],
    cluster: Cluster,
    log_dir: Path,
    announce: Callable[[str], None],
    max_lora_rank: int | None = None,
) -> Iterator[Started]:
    """Yield the ready engines and reward model. All processes stop at the end of the block.

    `weights` yields the folder or Hub name for the engines. `announce` receives the placement before loading. With
    `max_lora_rank`, engines support adapters up to that rank.
    """
    with ExitStack() as stack:
        reservation = Reservation(_layout(config, cluster, has_reward_model=reward_model is not None), cluster)
        # Register first, so that the reservation is released even if starting fails.
        stack.callback(reservation.release)
        announce("; ".join(describe(reservation.layout, unit=cluster.unit)))
        settings = engine_settings(
            config.engine,
            config.model,
            config.pictures,
            max_model_len=config.prompts.max_len,
            seed=config.sampling.seed,
            max_lora_rank=max_lora_rank,
        )
        share = config.engine.vllm_gpu_memory_utilization
        engines = EnginePlan(backend, stack.enter_context(weights), settings, share)
        plans = [] if reward_model is None else [_reward_plan(config, reward_model)]
        started = stack.enter_context(Started(Processes(cluster, reservation, log_dir), plans, engines))
        if reward_model is not None:
            started.roles[REWARD].statistics = reward_model.statistics
        # Wait here, so that errors of the engines appear before the first chunk.
        started.engines.wait_until_built()
        yield started


def _layout(config: InferenceConfig, cluster: Cluster, *, has_reward_model: bool) -> Layout:
    size, num_engines = config.engine.vllm_tensor_parallel_size or 1, config.engine.vllm_num_engines
    ranks = (config.reward_ranks.reward_num_gpus_per_node or 1) if has_reward_model else 0
    # Share GPUs only if the model does not fit beside the engines.
    is_full = cluster.has_gpus and sum(cluster.node_gpus) < ranks + size
    given = config.placement.colocate_all_models
    together = has_reward_model and (is_full if given is None else given)
    if num_engines is None and cluster.has_gpus and not together:
        # The reward model is placed on the first node, so fewer GPUs remain there.
        left = [cluster.node_gpus[0] - ranks, *cluster.node_gpus[1:]]
        num_engines = sum(count // size for count in left) or 1
    shapes = {REWARD: (1, ranks)} if has_reward_model else {}
    settings = LayoutSettings(shapes=shapes, together=together, num_engines=num_engines, engine_size=size)
    return plan_layout(settings, node_gpus=cluster.node_gpus)


def _reward_plan(config: InferenceConfig, model: RewardModelPlan) -> RolePlan:
    settings = RoleSettings(model=model.source, deepspeed=DeepSpeedConfig(), seed=config.sampling.seed)
    # A sequence must fit in one micro-batch, with the separator that a process reward model reads.
    longest = config.prompts.max_len + len(model.last_separator)
    batch = BatchConfig(train_max_tokens_per_gpu=max(BatchConfig().max_tokens, longest))
    return RolePlan(ROLES[REWARD], settings, batch, model.quadratic_cost)
