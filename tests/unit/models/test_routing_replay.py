"""Replay of the rollout engine's experts: equal to the model's own choice, in packs, and against another router."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_causal_models import VOCABULARY, sequences, tiny_config
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.models import shape_bucketing
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.mixers.layers import use_configured_limits
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.requirements import PACKED_TYPES
from rlhf_cli.models.routing_replay import REPLAYED_TYPES, ExpertChoice, check_routing_replay
from rlhf_cli.models.shape_bucketing import rounded

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 4, 2
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15]]
REQUESTS = [GenerationRequest(PROMPTS[index % 3], seed=100 + index) for index in range(9)]


def save_tiny(kind: str, folder: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


def load_policy(path: str, *, replays_routing: bool = True, **settings: object) -> PolicyModel:
    source = ModelConfig.model_validate({"pretrain": path, "param_dtype": "fp32"} | settings)
    return PolicyModel(load_causal_lm(source), replays_routing=replays_routing)


@torch.no_grad()
def experts_in_transformers(path: str, sequence: TokenSequence) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    use_configured_limits(model)
    with ExpertChoice(model.get_decoder()).recorded() as experts:
        model(input_ids=torch.from_numpy(sequence.token_ids).long()[None], use_cache=False)
    return experts()


def other_experts(length: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.permuted(np.tile(np.arange(NUM_EXPERTS), (length, NUM_LAYERS, 1)), axis=-1)[..., :TOP_K]


def with_others(made: list[TokenSequence]) -> list[TokenSequence]:
    return [replace(one, routed_experts=other_experts(len(one), seed)) for seed, one in enumerate(made)]


@pytest.mark.parametrize("kind", sorted(REPLAYED_TYPES))
def test_replay_of_the_own_experts_changes_no_bit_and_of_others_reaches_the_experts(kind, tmp_path):
    path = save_tiny(kind, tmp_path)
    plain = load_policy(path, replays_routing=False)(pack(sequences()))[0]
    own = [replace(one, routed_experts=experts_in_transformers(path, one)) for one in sequences()]
    policy = load_policy(path)
    assert policy(pack(sequences()))[0].equal(plain)
    assert policy(pack(own))[0].equal(plain)
    num_tokens, num_layers = sum(map(len, own)), own[0].routed_experts.shape[1]  # type: ignore[union-attr]
    generator = np.random.default_rng(0)
    chosen = np.tile(np.arange(NUM_EXPERTS), (num_tokens, num_layers, 1))
    chosen = generator.permuted(chosen, axis=-1)[..., :TOP_K]
    places = np.split(chosen, np.cumsum([len(one) for one in own])[:-1])
    given: list[tuple[torch.Tensor, ...]] = []
    for name, part in policy.model.named_modules():
        if name.endswith(".experts"):
            part.register_forward_pre_hook(lambda _, args: given.append(args[1:]))
    others = policy(pack([replace(one, routed_experts=e) for one, e in zip(own, places, strict=True)]))[0]
    assert float((others - plain).abs().max()) > 1e-3
