"""Actor, critic and reward model of an online run with sequence or tensor parallelism. Functions run on each rank."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_training import OPTIM, weights_of
from vision_sequences import vision_sequences

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, RewardRank
from rlhf_cli.backends.roles.serialization import RankWork, SentWork
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.adapters import plan_adapter

GSPO = ActorCriticPolicyConfig(
    policy_loss="gspo",
    eps_clip_low_high=(0.02, 0.03),
    loss_agg="seq_mean",
    entropy_loss_coef=0.01,
    rollout_correction="seq_mask",
    rollout_correction_range=(0.9, 1.1),
)
"""Ratios, corrections and means over full sequences, which span several ranks."""
CLIP = ActorCriticPolicyConfig(entropy_loss_coef=0.01)
WEIGHTS = LossWeights({"ref": KLTerm(0.1, "k2")}, EntropyState(0.01))
STEPS = [np.arange(0, 5), np.arange(5, 7)]
LAST = np.arange(7, 8)
"""Step with one short response: other rank groups are idle, and some ranks of its group may have no target."""


def samples() -> list[TokenSequence]:
    """Return responses to three prompts, with token values that depend only on the seed."""
    rng = np.random.default_rng(0)
    made = []
    for prompt_length, lengths in ((6, (9, 2, 7)), (1, (5, 4)), (11, (1, 12, 1))):
        prompt = rng.integers(0, 40, prompt_length)
        for length in lengths:
            token_ids = np.concatenate([prompt, rng.integers(0, 40, length)]).astype(np.int32)
            mask = np.arange(len(token_ids)) >= prompt_length
            made.append(TokenSequence(token_ids, mask, columns=columns(rng, length)))
    return made


def columns(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    old = rng.normal(-5.7, 0.05, length)
    values = {
        "old_logprobs": old,
        "rollout_logprobs": old + rng.normal(0, 0.05, length),
        "ref_logprobs": old + rng.normal(0, 0.3, length),
        "advantages": rng.normal(0, 1, length),
        "old_values": rng.normal(0, 0.1, length),
        "returns": rng.normal(0.5, 1, length),
    }
    return {name: column.astype(np.float32) for name, column in values.items()}


def role_settings(
    pretrain: str,
    size: int,
    *,
    split: int = 1,
    stage: int = 2,
    policy: ActorCriticPolicyConfig = CLIP,
    lora_rank: int = 0,
    checkpointing: bool = False,
) -> RoleSettings:
    model = ModelConfig(pretrain=pretrain, param_dtype="fp32", gradient_checkpointing=checkpointing)
    return RoleSettings(
        model=model,
        deepspeed=DeepSpeedConfig(zero_stage=stage, sequence_parallel_size=size, tensor_parallel_size=split),  # type: ignore[arg-type]
        optim=OPTIM,
        learning_rate=1e-3,
        total_steps=10,
        seed=0,
        temperature=0.7,
        max_new_tokens=12,
        policy=policy,
        share_prompts=True,
        adapter=plan_adapter(model, LoraConfig(lora_rank=lora_rank), seed=1) if lora_rank else None,
        ema_beta=0.5 if split == 1 else None,
    )


class Shares:
    """This rank's shares in forward passes and steps, as assigned by the driver."""

    def __init__(self, size: int, *, split: int = 1, share_prompts: bool = True, max_tokens: int = 48) -> None:
        batch = BatchConfig(train_max_tokens_per_gpu=max_tokens // size)
        self._planner = MicroBatchPlanner(dist.get_world_size(), batch, 0.0, lambda: share_prompts, size, split)

    def answers(self, sequences: Sequence[TokenSequence], forward: Any) -> dict[int, torch.Tensor]:
        """Return this rank's results by sequence number."""
        mine = self._planner.plan(sequences)[dist.get_rank()]
        found: dict[int, torch.Tensor] = {}
        for members, values_K in zip(mine, forward([[sequences[i] for i in m] for m in mine]), strict=True):
            bounds = np.cumsum([sequences[i].num_trained for i in members])[:-1]
            values = map(torch.from_numpy, np.split(values_K, bounds) if members else [])
            found |= dict(zip(members, values, strict=True))
        return found

    def steps(self, steps: Sequence[np.ndarray], of: Sequence[TokenSequence] | None = None) -> RankWork:
        """Return this rank's share of the steps, with the common or given samples."""
        return self._planner.steps(of or samples(), steps)[dist.get_rank()]


def actor(pretrain: str, size: int, folder: Path | None, *, split: int = 1, **settings: Any) -> dict[str, Any]:
    """Return log-probs, then run steps; includes the weights for engines, and their saved average."""
    role = ActorRank(role_settings(pretrain, size, split=split, **settings))
    shares, sequences = Shares(size, split=split), samples()
    found: dict[str, Any] = {"before": shares.answers(sequences, role.logprobs)}
    metrics = role.update(shares.steps(STEPS), False, WEIGHTS) + role.update(shares.steps([LAST]), True, WEIGHTS)
    if role.settings.adapter is not None:
        found["base"] = shares.answers(sequences, role.base_logprobs)
    if folder is not None:
        folder.mkdir(exist_ok=True)
        role.save_average(folder)
        found["average"] = load_file(next(folder.glob("*.safetensors"))) if dist.get_rank() == 0 else {}
    found["pushed"] = {name: weight.clone() for name, weight in role.engine_weights()}
    return found | {"metrics": metrics, "weights": weights_of(role.engine, role.hf_model)}


def pictured_actor(folder: Path) -> dict[str, Any]:
    """Return log-probs, then run a ZeRO-3 actor step on two responses each to a prompt with an image and to two
    without, as sent by the driver.
    """
    role = ActorRank(role_settings(str(folder), 1, stage=3))
    sequences = [
        replace(one, token_ids=np.append(one.token_ids[:-1], last).astype(np.int32))
        for one in vision_sequences(folder, [[(56, 84)], [], []])
        for last in (7, 8)
    ]
    rng, shares = np.random.default_rng(0), Shares(1, max_tokens=512)
    made = [replace(sequence, columns=columns(rng, sequence.num_trained)) for sequence in sequences]
    found = shares.answers(sequences, lambda mine: role.logprobs(*_sent(RankWork([mine])).steps))
    step = _sent(shares.steps([np.arange(len(made))], made))
    return {
        "before": found,
        "pictures": sum(bool(sequences[number].pictures) for number in found),
        "metrics": role.update(step, False, WEIGHTS),
        "weights": weights_of(role.engine, role.hf_model),
    }


def _sent(work: RankWork) -> Any:
    """Return a rank's work as received."""
    return pickle.loads(pickle.dumps(SentWork.of(work))).work(work.chunks)


def critic(pretrain: str, size: int, *, split: int = 1, **settings: Any) -> dict[str, Any]:
    """Return values, then run critic steps."""
    role = CriticRank(role_settings(pretrain, size, split=split, **settings))
    shares, sequences = Shares(size, split=split), samples()
    found: dict[str, Any] = {"before": shares.answers(sequences, role.values)}
    metrics = role.update(shares.steps([*STEPS, LAST]))
    return found | {"metrics": metrics, "weights": weights_of(role.engine, role.hf_model)}


def reward(pretrain: str, size: int) -> dict[str, Any]:
    """Return scores at response ends."""
    role = RewardRank(role_settings(pretrain, size, stage=3))
    ends = [TokenSequence(sequence.token_ids, np.arange(len(sequence)) == len(sequence) - 1) for sequence in samples()]
    return {"before": Shares(size, share_prompts=False).answers(ends, role.scores)}


def online_roles(model: str, judge: str, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return results by role."""
    folder = folder / f"averages{dist.get_world_size()}"
    torch.manual_seed(0)
    return {
        "gspo": actor(model, size, folder, policy=GSPO, checkpointing=True),
        "adapter": actor(model, size, folder, lora_rank=2, stage=3),
        "critic": critic(model, size, stage=1),
        "reward": reward(judge, size),
    }
