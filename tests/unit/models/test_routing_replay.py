"""Replay of the rollout engine's experts: in routers of each type, in packs and gradients, and with another router."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_causal_models import sequences, tiny_config
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.rollout.vllm_batch import _generation
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.models import shape_bucketing
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.requirements import PACKED_TYPES, packed_attention
from rlhf_cli.models.routing_replay import REPLAYED_TYPES, ExpertChoice, check_routing_replay
from rlhf_cli.models.shape_bucketing import rounded

NUM_EXPERTS, TOP_K = 4, 2  # of all tiny models
SAMPLING = SamplingParams(max_new_tokens=12, returns_experts=True)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15]]
REQUESTS = [GenerationRequest(PROMPTS[index % 3], seed=100 + index) for index in range(12)]


def some_experts(length: int, num_layers: int, seed: int) -> np.ndarray:
    everyone = np.tile(np.arange(NUM_EXPERTS, dtype=np.uint8), (length, num_layers, 1))
    return np.random.default_rng(seed).permuted(everyone, axis=-1)[..., :TOP_K]


def with_some_experts(made: list[TokenSequence], num_layers: int) -> list[TokenSequence]:
    return [replace(one, routed_experts=some_experts(len(one), num_layers, seed)) for seed, one in enumerate(made)]


@torch.no_grad()
def with_own_experts(model: PreTrainedModel, made: list[TokenSequence]) -> list[TokenSequence]:
    choice, found = ExpertChoice(model.get_decoder()), []
    for one in made:
        with choice.recorded() as experts:
            model(input_ids=torch.from_numpy(one.token_ids).long()[None], use_cache=False)
        found.append(replace(one, routed_experts=experts()))
    return found


@pytest.mark.parametrize("kind", sorted(REPLAYED_TYPES))
@torch.no_grad()
def test_own_experts_change_no_bit_and_others_are_used_with_weights(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager", dtype=torch.float32)
    own = with_own_experts(model.eval(), sequences())
    model.set_attn_implementation(packed_attention(ModelConfig(pretrain="", param_dtype="fp32"), model.config))
    plain = PolicyModel(model)(pack(sequences()))[0]
    policy = PolicyModel(model, replays_routing=True)
    assert policy(pack(sequences()))[0].equal(plain)
    assert policy(pack(own))[0].equal(plain)
    batch = pack(with_some_experts(sequences(), num_layers=len(model.get_decoder().layers)))
    assert batch.routed_experts is not None
    used: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, layer in enumerate(model.get_decoder().layers):
        for name, part in layer.named_modules():
            if name.endswith(".experts"):
                part.register_forward_pre_hook(lambda _, args, n=number: used.update({n: args[1:]}))
    policy(batch)
    assert used
    for number, (experts, weights) in used.items():
        expected = batch.routed_experts[:, number].long()
        assert experts.equal(expected if len(experts) == len(expected) else expected[batch.read_R])
        assert (weights > 0).all()


def test_types_are_mixtures_that_are_packed_and_others_are_refused_by_name():
    assert REPLAYED_TYPES <= PACKED_TYPES
    check_routing_replay(AutoConfig.for_model("qwen3_5_moe"))  # the type of its text model is in the list
    for kind in ("qwen2", "jetmoe", "deepseek_v2"):
        with pytest.raises(UsageError, match=f"models of type {kind} have no routers that can be replayed; supported"):
            check_routing_replay(AutoConfig.for_model(kind))
    with pytest.raises(UsageError, match="this granitemoehybrid model is not a mixture of experts"):
        check_routing_replay(AutoConfig.for_model("granitemoehybrid", num_local_experts=0))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with a Qwen3-MoE of 3 layers, in which the scores of all experts are close but their outputs are not."""
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe")
    config.norm_topk_prob = True  # as in the published models
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            weight.data *= 1e-4
    path = tmp_path_factory.mktemp("qwen3-moe")
    model.save_pretrained(path)
    return str(path)


def load_policy(path: str, **settings: object) -> PolicyModel:
    source = ModelConfig.model_validate({"pretrain": path, "param_dtype": "fp32"} | settings)
    return PolicyModel(load_causal_lm(source), replays_routing=True)


def trained_on(policy: PolicyModel, made: list[TokenSequence]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs and all gradients of their weighted sum."""
    logprobs = policy(pack(made))[0]
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_equal_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].equal(gradient) for name, gradient in expected.items())


def test_gradients_of_the_own_experts_are_equal_bit_for_bit(model_dir):
    with_own = with_own_experts(AutoModelForCausalLM.from_pretrained(model_dir), sequences())
    logprobs, gradients = trained_on(load_policy(model_dir).train(), sequences())
    replayed, of_replayed = trained_on(load_policy(model_dir).train(), with_own)
    assert replayed.equal(logprobs)
    assert_equal_gradients(of_replayed, gradients)


def test_gates_are_the_trained_routers_probabilities_of_the_replayed_experts(model_dir, monkeypatch):
    made = with_some_experts(sequences(), num_layers=3)
    replayed, of_replayed = trained_on(load_policy(model_dir).train(), made)
    batch = pack(made)
    assert batch.routed_experts is not None
    layers = [*batch.routed_experts.long().unbind(1)]
    layers[-1] = layers[-1][batch.read_R]
    left = iter(layers)

    def forward(router: Qwen3MoeTopKRouter, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_TE, experts_Tk = linear(hidden_TD, router.weight), next(left)
        probabilities_Tk = logits_TE.softmax(-1).gather(1, experts_Tk)
        return logits_TE, probabilities_Tk / probabilities_Tk.sum(-1, keepdim=True), experts_Tk

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    logprobs, gradients = trained_on(load_policy(model_dir).train(), sequences())
    torch.testing.assert_close(replayed, logprobs)
    torch.testing.assert_close(of_replayed, gradients)
    assert all(gradients[name].abs().max() > 0 for name in gradients if name.endswith("gate.weight"))


def test_recomputed_layers_replay_the_same_experts(model_dir):
    made = with_some_experts(sequences(), num_layers=3)
    logprobs, gradients = trained_on(load_policy(model_dir).train(), made)
    again, recomputed = trained_on(load_policy(model_dir, gradient_checkpointing=True).train(), made)
    torch.testing.assert_close(again, logprobs)
    torch.testing.assert_close(recomputed, gradients)


# Packs


def group() -> list[TokenSequence]:
    """Return three responses to a prompt, whose last tokens have no experts, as from an engine."""
    made = []
    for seed, answer in enumerate(([1, 2], [3], [4, 5, 6])):
        token_ids = np.array([7, 8, 9, *answer], dtype=np.int32)
        experts = some_experts(len(token_ids) - 1, 3, seed)
        experts[:3] = some_experts(3, 3, seed=9)
        made.append(TokenSequence(token_ids, np.arange(len(token_ids)) >= 3, routed_experts=experts))
    return made


@torch.no_grad()
def test_a_shared_prompt_has_the_experts_of_its_first_response(model_dir):
    policy = load_policy(model_dir)
    members = group()
    apart, shared = policy(pack(members))[0], policy(pack_groups(members))[0]
    torch.testing.assert_close(shared, apart, atol=1e-5, rtol=0)
    assert (policy(pack([replace(one, routed_experts=None) for one in members]))[0] - apart).abs().max() > 0.1
    first, *others = members
    flipped = [replace(one, routed_experts=NUM_EXPERTS - 1 - one.routed_experts) for one in others]  # type: ignore
    (batch, experts) = pack_groups([first, *flipped]), [one.routed_experts for one in (first, *flipped)]
    expected = [experts[0][:3], *(own[3:] for own in experts)]  # type: ignore[index]
    assert batch.routed_experts is not None
    has_experts = (batch.routed_experts >= 0).all(-1).all(-1)
    assert has_experts.tolist() == [True] * 3 + [True, False] + [False] + [True, True, False]
    assert batch.routed_experts[has_experts].tolist() == np.concatenate(expected).tolist()


@torch.no_grad()
def test_tokens_without_experts_choose_their_own(model_dir):
    policy = load_policy(model_dir)
    own = with_own_experts(AutoModelForCausalLM.from_pretrained(model_dir), sequences())
    partly = [
        replace(one, routed_experts=one.routed_experts[:count]) for one, count in zip(own, (30, 4, 0), strict=True)
    ]
    plain = policy(pack(sequences()))[0]
    assert policy(pack(partly))[0].equal(plain)
    assert policy(pack([*partly[:2], sequences()[2]]))[0].equal(plain)
    assert pack([]).routed_experts is None


def test_filler_chooses_its_own_experts(monkeypatch):
    monkeypatch.setattr(shape_bucketing, "has_bf16_products", lambda: True)
    batch = pack(group())
    filled = rounded(batch, torch.bfloat16)
    assert batch.routed_experts is not None
    assert filled.routed_experts is not None
    assert len(filled.routed_experts) == 64
    assert filled.routed_experts[:15].equal(batch.routed_experts)
    assert (filled.routed_experts[15:] == -1).all()


# Engine


def responses(path: str, sampling: SamplingParams = SAMPLING, *, max_num_seqs: int = 256) -> list[Generation]:
    engine = TransformersEngine(
        path, EngineSettings(max_model_len=64, dtype="fp32", record_routed_experts=True, max_num_seqs=max_num_seqs)
    )

    async def generate() -> list[Generation]:
        try:
            return await engine.generate(REQUESTS, sampling)
        finally:
            await engine.shutdown()

    return asyncio.run(generate())


def sequence_of(request: GenerationRequest, response: Generation) -> TokenSequence:
    token_ids = np.array(request.prompt_ids + response.token_ids, dtype=np.int32)
    is_sampled = np.arange(len(token_ids)) >= len(request.prompt_ids)
    return TokenSequence(token_ids, is_sampled, routed_experts=response.routed_experts)


@pytest.mark.parametrize("max_num_seqs", [256, 4])
def test_an_engine_names_the_experts_of_all_tokens_except_the_last(model_dir, max_num_seqs):
    made = [*map(sequence_of, REQUESTS, responses(model_dir, max_num_seqs=max_num_seqs))]
    expected = with_own_experts(AutoModelForCausalLM.from_pretrained(model_dir), made)
    for one, other in zip(made, expected, strict=True):
        assert one.routed_experts is not None
        assert other.routed_experts is not None
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts[:-1], strict=True)


def test_other_batches_of_the_engine_name_no_experts(model_dir):
    found = responses(model_dir, replace(SAMPLING, returns_experts=False))
    assert found == responses(model_dir)
    assert [one.routed_experts for one in found] == [None] * len(REQUESTS)


def test_experts_of_vllm_are_returned_to_batches_for_training_only():
    experts = some_experts(3, num_layers=3, seed=0)
    response = SimpleNamespace(
        token_ids=[7],
        logprobs=SimpleNamespace(start_indices=[0], token_ids=[7], logprobs=[-0.5]),
        finish_reason="stop",
        weight_versions=[],
        routed_experts=experts,
    )
    output: Any = SimpleNamespace(outputs=[response])
    assert _generation(output, SAMPLING).routed_experts is experts
    assert _generation(output, replace(SAMPLING, returns_experts=False)).routed_experts is None


def k3(logprobs: torch.Tensor, sampled: torch.Tensor) -> float:
    return float((torch.expm1(logprobs - sampled) - (logprobs - sampled)).mean())


@torch.no_grad()
def test_another_router_agrees_with_the_engine_only_if_its_experts_are_replayed(model_dir, tmp_path):
    for file in Path(model_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("gate.weight"):
            weight += 1e-5 * torch.randn(weight.shape)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = responses(model_dir)
    made, sampled = [*map(sequence_of, REQUESTS, found)], torch.tensor([x for one in found for x in one.logprobs])
    policy = load_policy(str(tmp_path))
    without = policy(pack([replace(one, routed_experts=None) for one in made]))[0]
    assert k3(without, sampled) > 1e-3
    assert k3(policy(pack(made))[0], sampled) < 1e-8
    of_one_prompt = torch.tensor([x for one in found[::3] for x in one.logprobs])
    assert k3(policy(pack_groups(made[::3]))[0], of_one_prompt) < 1e-8
