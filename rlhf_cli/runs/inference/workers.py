"""Starts and stops the rollout engines and reward model of `generate` and `eval`.

Engines keep their initial weights: at most adapters are pushed, and models do not take turns on the GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_cli.backends.cluster.default_layout import memory_share
from rlhf_cli.backends.cluster.placement import ENGINE, Layout, Seat, describe, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.roles.groups import Dealer, FrozenRole, RewardRole
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.worker_group import WorkerGroup, start_engine, start_ranks
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import HOST_ENGINE
from rlhf_cli.config.generate import InferenceConfig
from rlhf_cli.config.placement import PlacementConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig, OptimConfig
from rlhf_cli.models.reward_model import RewardModelPlan

if TYPE_CHECKING:  # only the process of a rank imports DeepSpeed
    from rlhf_cli.backends.roles.ranks import RewardRank

REWARD = "reward"


@dataclass(frozen=True)
class Models:
    """Engines and reward model."""

    engines: EngineGroup
    reward_model: RewardRole | None


@dataclass(frozen=True)
class _Places:
    """Placement and settings of engines and ranks."""

    config: InferenceConfig
    backend: str
    pretrain: str
    layout: Layout
    reservation: Reservation
    cluster: Cluster
    log_dir: Path
    max_lora_rank: int | None

    def threads(self, role: str) -> int:
        """Return the number of CPU threads for each process of a role."""
        return self.cluster.threads(len(self.layout.of(role)))


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
) -> Iterator[Models]:
    """Yield the ready engines and reward model. All processes stop at the end of the block.

    `weights` yields the folder or Hub name for the engines. `announce` receives the placement before loading. With
    `max_lora_rank`, engines support adapters up to that rank.
    """
    with ExitStack() as stack:
        reservation = Reservation(_layout(config, cluster, has_reward_model=reward_model is not None), cluster)
        stack.callback(reservation.release)
        announce("; ".join(describe(reservation.layout, unit=cluster.unit)))
        pretrain = stack.enter_context(weights)
        places = _Places(config, backend, pretrain, reservation.layout, reservation, cluster, log_dir, max_lora_rank)
        ranks = None if reward_model is None else _start_reward_model(places, reward_model)
        engines = _start_engines(places, ranks)
        stack.callback(engines.shutdown)
        engines.wait_until_built()
        yield Models(engines, None if reward_model is None else _reward_group(places, ranks, reward_model))


def _layout(config: InferenceConfig, cluster: Cluster, *, has_reward_model: bool) -> Layout:
    sampling, places = config.sampling, config.placement
    size, ranks = sampling.vllm_tensor_parallel_size, places.reward_num_gpus_per_node if has_reward_model else 0
    is_full = cluster.has_gpus and sum(cluster.node_gpus) < ranks + size
    together = has_reward_model and (is_full if places.colocate_all_models is None else places.colocate_all_models)
    num_engines = sampling.vllm_num_engines
    if num_engines is None and cluster.has_gpus and not together:
        left = [cluster.node_gpus[0] - ranks, *cluster.node_gpus[1:]]
        num_engines = sum(count // size for count in left) or 1
    placement = PlacementConfig(reward_num_gpus_per_node=places.reward_num_gpus_per_node, colocate_all_models=together)
    engines = RolloutConfig(vllm_num_engines=num_engines, vllm_tensor_parallel_size=size)
    roles = (REWARD,) if has_reward_model else ()
    return plan_layout(placement, engines, roles=roles, node_gpus=cluster.node_gpus)


def _start_reward_model(places: _Places, model: RewardModelPlan) -> WorkerGroup["RewardRank"]:
    """Start the reward model and wait until it is loaded: an engine on the same GPU measures free memory at startup."""
    settings = RoleSettings(
        model=model.source,
        deepspeed=DeepSpeedConfig(),
        optim=OptimConfig(),
        learning_rate=0.0,
        total_steps=1,
        seed=places.config.out.seed,
        temperature=1.0,
        max_new_tokens=places.config.sampling.max_new_tokens,
        policy=PolicyConfig(),
    )
    group = start_ranks(
        REWARD, places.layout, places.reservation, log_dir=places.log_dir, threads=places.threads(REWARD)
    )
    group.wait(group.build(ROLES[REWARD].rank, settings, local_size=places.layout.local_size(REWARD)))
    return group


def _reward_group(places: _Places, ranks: WorkerGroup["RewardRank"] | None, model: RewardModelPlan) -> RewardRole:
    assert ranks is not None
    default = BatchConfig()
    longest = places.config.prompts.max_len + len(model.last_separator)
    max_tokens = max(default.max_tokens, longest)
    dealer = Dealer(len(ranks), BatchConfig(train_max_tokens_per_gpu=max_tokens), model.quadratic_cost)
    return RewardRole(FrozenRole(ranks, dealer, takes_turns=False), statistics=model.statistics)


def _start_engines(places: _Places, ranks: WorkerGroup["RewardRank"] | None) -> EngineGroup:
    config, sampling = places.config, places.config.sampling
    settings = EngineSettings(
        max_model_len=config.prompts.max_len,
        dtype=config.model.param_dtype,
        seed=config.out.seed,
        tensor_parallel_size=sampling.vllm_tensor_parallel_size,
        gpu_memory_utilization=memory_share(
            sampling.vllm_gpu_memory_utilization, shared=any(seat.shared for seat in places.layout.of(ENGINE))
        ),
        enforce_eager=sampling.enforce_eager,
        enable_prefix_caching=sampling.enable_prefix_caching,
        trust_remote_code=config.model.trust_remote_code,
        num_threads=places.threads(ENGINE),
        vllm_args=sampling.engine_arguments,
        max_lora_rank=places.max_lora_rank,
        max_images_per_prompt=config.pictures.max_images_per_prompt,
        min_pixels=config.pictures.min_pixels,
        max_pixels=config.pictures.max_pixels,
    )

    def start(number: int) -> tuple[object, object]:
        seat = places.layout.of(ENGINE)[number]
        return start_engine(
            seat,
            places.reservation,
            log_dir=places.log_dir,
            threads=places.threads(ENGINE),
            environment=_engine_environment(places, seat, ranks),
            factory=HOST_ENGINE,
            args=(places.backend, places.pretrain, settings),
        )

    return EngineGroup(
        start,
        num_engines=len(places.layout.of(ENGINE)),
        takes_turns=False,
        sync_backend="shm",
        ranks_per_engine=sampling.vllm_tensor_parallel_size,
    )


def _engine_environment(places: _Places, seat: Seat, ranks: WorkerGroup["RewardRank"] | None) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a multi-GPU engine on shared GPUs: the GPUs of the reward model's ranks there."""
    if ranks is None or not (places.cluster.has_gpus and seat.shared and len(seat.gpus) > 1):
        return {}
    visible = ranks.visible_gpus()
    here = [s for s in places.layout.of(REWARD) if s.island == seat.island and s.gpus[0] in seat.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[other.rank] for other in here)}
