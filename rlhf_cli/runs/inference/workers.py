"""Starts and stops the rollout engines and reward model of `generate` and `eval`.

Engines keep their initial weights: at most adapters are pushed, and models do not take turns on the GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.cluster.default_layout import inference_layout
from rlhf_cli.backends.cluster.placement import describe, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.start import EnginePlan, Processes, RolePlan, Started
from rlhf_cli.backends.rollout.engine import engine_settings
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.runs.judge_model import JudgeModel

REWARD = "reward"


@dataclass(frozen=True)
class OtherModels:
    """Models that score responses: a reward model and a judge that the command starts."""

    reward: RewardModelPlan | None = None
    judge: JudgeModel | None = None


@contextmanager
def started_models(
    config: InferenceConfig,
    backend: str,
    others: OtherModels,
    *,
    weights: AbstractContextManager[str],
    cluster: Cluster,
    log_dir: Path,
    announce: Callable[[str], None],
    max_lora_rank: int | None = None,
) -> Iterator[Started]:
    """Yield the ready engines, reward model and judge. All processes stop at the end of the block.

    `weights` yields the folder or Hub name for the engines. `announce` receives the placement before loading. With
    `max_lora_rank`, engines support adapters up to that rank.
    """
    with ExitStack() as stack:
        reward_model, judge = others.reward, others.judge
        node_gpus = cluster.node_gpus if cluster.has_gpus else []
        placed = inference_layout(config, node_gpus, has_reward_model=reward_model is not None)
        reservation = Reservation(plan_layout(placed, node_gpus=cluster.node_gpus), cluster)
        # Register first, so that the reservation is released even if starting fails.
        stack.callback(reservation.release)
        announce("; ".join(describe(reservation.layout, unit=cluster.unit)))
        processes = Processes(cluster, reservation, log_dir)
        settings = engine_settings(
            config.engine,
            config.model,
            config.pictures,
            max_model_len=config.prompts.max_len,
            seed=config.sampling.seed,
            max_lora_rank=max_lora_rank,
            enable_sleep=processes.judge_takes_turns,
        )
        share = config.engine.vllm_gpu_memory_utilization
        engines = EnginePlan(backend, stack.enter_context(weights), settings, share, keeps_weights=True)
        max_images = config.pictures.max_images_per_prompt
        judged = None if judge is None else judge.plan(processes, config.engine, max_images=max_images)
        plans = [] if reward_model is None else [_reward_plan(config, reward_model)]
        started = stack.enter_context(Started(processes, plans, engines, judge=judged))
        if reward_model is not None:
            started.roles[REWARD].statistics = reward_model.statistics
        # Wait here, so that errors of the engines appear before the first chunk.
        started.engines.wait_until_built()
        if started.judge is not None:
            started.judge.wait_until_built()
        yield started


def _reward_plan(config: InferenceConfig, model: RewardModelPlan) -> RolePlan:
    settings = RoleSettings(model=model.source, deepspeed=DeepSpeedConfig(), seed=config.sampling.seed)
    # A sequence must fit in one micro-batch, with the separator that a process reward model reads.
    longest = config.prompts.max_len + len(model.last_separator)
    batch = BatchConfig(train_max_tokens_per_gpu=max(BatchConfig().max_tokens, longest))
    return RolePlan(ROLES[REWARD], settings, batch, model.quadratic_cost)
