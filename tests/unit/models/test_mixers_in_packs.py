"""Models with convolutions, recurrent layers, sinks or chunks: packs equal each sequence in plain transformers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_causal_models import VOCABULARY, tiny_config
from transformers import AutoModelForCausalLM

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapters import UNCALLED, load_with_adapter, plan_adapter
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.loading import load_causal_lm, switch_off_dropout
from rlhf_cli.models.mixers.layers import fix_model, layers_of
from rlhf_cli.models.mixers.operations import bind_mixers
from rlhf_cli.models.mixers.runs import MixerRuns
from rlhf_cli.models.packs import with_filler
from rlhf_cli.models.policy import PolicyModel, hidden_matrices
from rlhf_cli.models.sequence_parallel.parts import Runs

MIXERS = {
    "bamba": ("Mamba 2",),
    "falcon_h1": ("Mamba 2",),
    "granitemoehybrid": ("Mamba 2",),
    "jamba": ("Mamba 1",),
    "kimi_linear": ("Kimi delta attention",),
    "lfm2": ("short convolution",),
    "lfm2_moe": ("short convolution",),
    "minimax": ("lightning attention",),
    "nemotron_h": ("Mamba 2",),
    "olmo_hybrid": ("gated delta net",),
    "qwen3_5_moe_text": ("gated delta net",),
    "qwen3_5_text": ("gated delta net",),
    "qwen3_next": ("gated delta net",),
    "recurrent_gemma": ("RG-LRU",),
}
"""Mixers by model type."""
KINDS = sorted(MIXERS)
OTHERS = [
    *("gpt_oss", "granite_swa", "granitemoe_swa", "llama4_text", "mimo_v2_flash"),
    *("gemma3n_text", "gemma4_unified_text"),
]
"""Types with attention sinks, chunked attention (the packs here are longer than a chunk), keys of earlier layers."""
CONTINUING = [kind for kind in KINDS if kind not in ("jamba", "recurrent_gemma")]
"""Types that pack shared prompts once."""
CPU = torch.device("cpu")
LOGPROBS = 1e-5
GRADIENTS = 1e-4  # relative to the largest of the parameter, or to a hundredth of the largest of the model
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def tiny_model(kind: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation=attention, dtype=torch.float32)
    switch_off_dropout(model)
    fix_model(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(parameter)
    # Checkpointed layers are recomputed in training mode only.
    return model.train()


def packed_model(kind: str) -> PolicyModel:
    return PolicyModel(tiny_model(kind, VARLEN))


def sequences_of(*lengths: int, prompt: int | None = None, seed: int = 0) -> list[TokenSequence]:
    """Return random sequences, or responses of these lengths to one random prompt."""
    generator = np.random.default_rng(seed)
    prompt_ids = generator.integers(3, VOCABULARY, prompt or 1)
    made = []
    for length in lengths:
        first = prompt_ids if prompt else generator.integers(3, VOCABULARY, 1)
        token_ids = np.concatenate([first, generator.integers(3, VOCABULARY, length)])
        made.append(TokenSequence(token_ids.astype(np.int32), np.arange(token_ids.size) >= first.size))
    return made


# The kernels of the convolutions have 3 or 4 positions, chunks of scans 16 or 64.
APART = sequences_of(22, 1, 39, 6, 89, 2)
SHARED = [
    *sequences_of(20, 5, 1, prompt=11),
    *sequences_of(33, 8, prompt=2, seed=1),
    *sequences_of(8, 70, 2, prompt=66, seed=2),
    *sequences_of(9, prompt=4, seed=3),
]


def alone(model: torch.nn.Module, sequences: list[TokenSequence], weights: torch.Tensor) -> Results:
    """Return log-probs of targets and gradients of their weighted sum, one sequence after the other."""
    model.zero_grad()
    logprobs = []
    for sequence, weight in zip(sequences, weights.split([s.num_trained for s in sequences]), strict=True):
        ids = torch.from_numpy(sequence.token_ids).long()
        rows = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, rows - 1]
        own = logits.log_softmax(-1).gather(1, ids[rows, None])[:, 0]
        (own * weight).sum().backward()
        logprobs.append(own.detach())
    return torch.cat(logprobs), gradients(model)


def in_pack(policy: PolicyModel, made: Pack, weights: torch.Tensor) -> Results:
    policy.zero_grad()
    logprobs, _ = policy(made)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), gradients(policy.model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(results: Results, wanted: Results) -> None:
    assert (results[0] - wanted[0]).abs().max() < LOGPROBS
    assert results[1].keys() >= wanted[1].keys()
    assert_same_gradients(results[1], wanted[1])


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    # Gradients of decays are small sums of large terms in float32: with scans in float64, packs with shared prompts are
    # 300 times as close.
    least = max(gradient.abs().max() for gradient in wanted.values()) / 100
    for name, gradient in wanted.items():
        distance = (found[name] - gradient).abs().max() / max(gradient.abs().max(), least)
        assert distance < GRADIENTS, name


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("sequences", "pack_sequences"),
    [(APART, pack), (SHARED, pack), (SHARED, pack_groups)],
    ids=["apart", "repeated", "shared"],
)
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_pack_has_the_logprobs_and_gradients_of_each_sequence(
    kind: str,
    sequences: list[TokenSequence],
    pack_sequences: Callable[[list[TokenSequence]], Pack],
    recompute: bool,
) -> None:
    if pack_sequences is pack_groups and kind not in [*CONTINUING, *OTHERS]:
        pytest.skip("its packs repeat prompts")
    torch.manual_seed(1)
    weights = torch.randn(sum(sequence.num_trained for sequence in sequences))
    policy = packed_model(kind)
    if recompute:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results = in_pack(policy, pack_sequences(sequences), weights)
    assert_equal(results, alone(tiny_model(kind, "eager"), sequences, weights))


@pytest.mark.parametrize("kind", CONTINUING)
def test_another_sequence_changes_nothing_at_all(kind: str) -> None:
    """Without a tolerance: other embeddings times 100 do not change a hidden state, nor do they get a gradient."""
    made = pack_groups([*sequences_of(20, 5, prompt=11), *sequences_of(8, 70, prompt=66, seed=2)])
    decoder = packed_model(kind).model.get_decoder()
    assert made.keys is not None
    runs = Runs(made.cu_seqlens, made.keys.cu_seqlens, made.max_seqlen, made.keys.max_seqlen, made.keys.index_U)
    bounds = made.cu_seqlens.tolist()  # prompt, 20, 5, prompt, 8, 70
    embeddings = decoder.get_input_embeddings()(made.input_ids_T[None]).detach()
    changed = embeddings.clone()
    changed[:, bounds[3] :] *= 100
    changed.requires_grad_()

    def hidden(inputs: torch.Tensor) -> torch.Tensor:
        options = {"position_ids": made.position_ids_T[None], "use_cache": False, "mixer_runs": MixerRuns(runs, CPU)}
        return decoder(inputs_embeds=inputs, **options, **runs.as_arguments()).last_hidden_state

    states, others = hidden(embeddings), hidden(changed)
    assert torch.equal(states[:, : bounds[3]], others[:, : bounds[3]])
    others[:, bounds[1] : bounds[2]].pow(2).sum().backward()
    assert changed.grad is not None
    assert not changed.grad[:, bounds[2] :].any(), "the other response and the other tree"
    assert changed.grad[:, : bounds[1]].any(), "the prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_pack_gives_every_parameter_a_zero_gradient(kind: str) -> None:
    policy = packed_model(kind)
    results = in_pack(policy, pack([]), torch.zeros(0))[1]
    # Experts without tokens have none; DeepSpeed counts them as zero.
    assert {name for name, _ in policy.model.named_parameters() if "expert" not in name} <= results.keys()
    assert not any(gradient.any() for gradient in results.values())


@pytest.mark.parametrize("kind", KINDS)
def test_filler_changes_nothing(kind: str) -> None:
    policy = packed_model(kind)
    for made in (pack(APART), (pack_groups if kind in CONTINUING else pack)(SHARED)):
        with torch.no_grad():
            assert (policy(made)[0] - policy(with_filler(made, 5))[0]).abs().max() < LOGPROBS


@pytest.mark.parametrize("kind", KINDS)
def test_two_packs_and_a_generation_may_come_before_one_backward(kind: str) -> None:
    first, second = pack(APART), (pack_groups if kind in CONTINUING else pack)(SHARED)
    policy = packed_model(kind)
    ones = [torch.ones(made.targets_K.numel()) for made in (first, second)]
    separate = [in_pack(policy, made, weights)[1] for made, weights in zip((first, second), ones, strict=True)]
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.zero_grad()
    total = policy(first)[0].sum() + policy(second)[0].sum()
    with torch.no_grad():
        tiny_model(kind, "eager")(input_ids=torch.arange(3, 20)[None], use_cache=False)
    total.backward()
    assert_same_gradients(gradients(policy.model), {name: one + separate[1][name] for name, one in separate[0].items()})


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_have_the_mixers(kind: str) -> None:
    layers = layers_of(tiny_config(kind), trust_remote_code=False)
    assert layers.mixers == MIXERS[kind]
    assert layers.can_continue == (kind in CONTINUING)
    assert not layers.unsupported


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_finite(kind: str) -> None:
    policy = packed_model(kind).bfloat16()
    made = (pack_groups if kind in CONTINUING else pack)(SHARED)
    logprobs, found = in_pack(policy, made, torch.ones(made.targets_K.numel()))
    assert logprobs.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_of_all_linear_layers_gets_a_gradient(kind: str, tiny_hybrid_dir: Callable[[str], str]) -> None:
    source = ModelConfig(pretrain=tiny_hybrid_dir(kind), param_dtype="fp32")
    # Routers of these two are no linear layers: "all-linear" is refused, as for other mixtures.
    mixtures = {"minimax": ["qkv_proj"], "qwen3_next": ["in_proj_qkvz", "in_proj_ba"]}
    targets = [*mixtures[kind], "out_proj", "q_proj"] if kind in mixtures else ["all-linear"]
    plan = plan_adapter(source, LoraConfig(lora_rank=4, target_modules=targets), seed=0)
    policy = PolicyModel(load_with_adapter(load_causal_lm, source, plan))
    made = pack(SHARED)
    found = in_pack(policy, made, torch.randn(made.targets_K.numel()))[1]
    adapted = {name: gradient for name, gradient in found.items() if "lora_B" in name and "expert" not in name}
    assert any(
        mixer in name
        for name in adapted
        for mixer in ("conv", "mamba", "linear_attn", "mixer", "self_attn", "temporal_block")
    )
    assert all(gradient.any() for gradient in adapted.values())


@pytest.mark.parametrize("kind", sorted(UNCALLED))
def test_an_adapter_on_a_layer_that_is_not_called_is_refused(kind: str, tiny_hybrid_dir: Callable[[str], str]) -> None:
    source = ModelConfig(pretrain=tiny_hybrid_dir(kind), param_dtype="fp32")
    plan = plan_adapter(source, LoraConfig(lora_rank=4, target_modules=["in_proj", UNCALLED[kind]]), seed=0)
    with pytest.raises(UsageError, match=f"{UNCALLED[kind]} of {kind} is not called as a layer"):
        load_with_adapter(load_causal_lm, source, plan)


def test_muon_leaves_convolutions_to_adamw() -> None:
    model = tiny_model("lfm2", VARLEN)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(parameter)] for parameter in hidden_matrices(model)}
    assert "model.layers.0.conv.in_proj.weight" in by_muon
    assert "model.layers.0.conv.conv.weight" not in by_muon


def test_a_release_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2", VARLEN)
    monkeypatch.delattr("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn")
    with pytest.raises(RunError, match=r"Lfm2ShortConv cannot be packed: .*, there is no causal_conv1d_fn"):
        bind_mixers(model.get_decoder())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear"])
def test_a_release_with_other_arguments_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind, VARLEN)
    mixer = next(part for part in model.modules() if type(part).__name__.endswith(("GatedDeltaNet", "DeltaAttention")))
    for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"):
        monkeypatch.setattr(f"{type(mixer).__module__}.{name}", lambda query, key, value: None, raising=False)
    with pytest.raises(RunError, match=f"{type(mixer).__name__} cannot be packed: .* has no argument beta"):
        bind_mixers(model.get_decoder())


def test_each_run_is_preceded_by_what_it_continues() -> None:
    """Runs of 3 and 2 tokens, the second behind the first, and a sequence of 1."""
    index = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    runs = MixerRuns(Runs(torch.tensor([0, 3, 5, 6]), torch.tensor([0, 3, 8, 9]), 3, 5, index), CPU)
    context, own = runs.context(2)
    assert context.tolist() == [6, 6, 0, 1, 2, 1, 2, 3, 4, 6, 6, 5]
    assert own.tolist() == [2, 3, 4, 7, 8, 11]
    assert runs.context(4)[0].tolist() == [6, 6, 6, 6, 0, 1, 2, 6, 0, 1, 2, 3, 4, 6, 6, 6, 6, 5]


def test_runs_are_rows_of_similar_lengths() -> None:
    """Prompts of 3 and 2 tokens with continuations of 2 and 1, then sequences of 200 and 100 tokens."""
    lengths, before = [3, 2, 2, 1, 200, 100], [[], [0, 1, 2], [], [5, 6], [], []]
    bounds = np.cumsum([0, *lengths])
    keys = [np.array([*prompt, *range(bounds[i], bounds[i + 1])]) for i, prompt in enumerate(before)]
    bounds_k = np.cumsum([0, *(part.size for part in keys)])
    runs = MixerRuns(
        Runs(torch.from_numpy(bounds), torch.from_numpy(bounds_k), 200, 200, torch.from_numpy(np.concatenate(keys))),
        CPU,
    )
    prompts, long, shorter, continued = runs.rows
    assert prompts.is_continued
    assert prompts.index_NL.tolist() == [[0, 1, 2], [308, 5, 6]]
    assert [tuple(rows.index_NL.shape) for rows in (long, shorter)] == [(1, 200), (1, 100)]
    assert continued.index_NL.tolist() == [[3, 4], [7, 308]]
    assert continued.parents_N is not None
    assert continued.parents_N.tolist() == [0, 1]
    places = torch.cat([rows.index_NL.flatten() for rows in runs.rows])
    assert places[runs.home_T].tolist() == list(range(308))
