"""Models with convolutions or recurrent layers: packs equal each sequence in plain transformers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_causal_models import VOCABULARY, tiny_config
from transformers import AutoModelForCausalLM

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.errors import RunError
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.loading import switch_off_dropout
from rlhf_cli.models.mixers.layers import layers_of
from rlhf_cli.models.mixers.operations import bind_mixers
from rlhf_cli.models.mixers.runs import MixerRuns
from rlhf_cli.models.packs import with_filler
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.sequence_parallel.parts import Runs

MIXERS = {"lfm2": ("short convolution",), "lfm2_moe": ("short convolution",)}
"""Mixers by model type."""
KINDS = sorted(MIXERS)
LOGPROBS = 1e-5
GRADIENTS = 1e-4  # relative to the largest of a parameter
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def tiny_model(kind: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation=attention, dtype=torch.float32)
    switch_off_dropout(model)
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
    for name, gradient in wanted[1].items():
        distance = (results[1][name] - gradient).abs().max() / (gradient.abs().max() + 1e-6)
        assert distance < GRADIENTS, name


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("sequences", "pack_sequences"),
    [(APART, pack), (SHARED, pack), (SHARED, pack_groups)],
    ids=["apart", "repeated", "shared"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_has_the_logprobs_and_gradients_of_each_sequence(
    kind: str,
    sequences: list[TokenSequence],
    pack_sequences: Callable[[list[TokenSequence]], Pack],
    recompute: bool,
) -> None:
    weights = torch.randn(sum(sequence.num_trained for sequence in sequences))
    policy = packed_model(kind)
    if recompute:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results = in_pack(policy, pack_sequences(sequences), weights)
    assert_equal(results, alone(tiny_model(kind, "eager"), sequences, weights))


@pytest.mark.parametrize("kind", KINDS)
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
        options = {"position_ids": made.position_ids_T[None], "use_cache": False, "mixer_runs": MixerRuns(runs)}
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
    for made in (pack(APART), pack_groups(SHARED)):
        with torch.no_grad():
            assert (policy(made)[0] - policy(with_filler(made, 5))[0]).abs().max() < LOGPROBS


@pytest.mark.parametrize("kind", KINDS)
def test_two_packs_and_a_generation_may_come_before_one_backward(kind: str) -> None:
    first, second = pack(APART), pack_groups(SHARED)
    policy = packed_model(kind)
    ones = [torch.ones(made.targets_K.numel()) for made in (first, second)]
    separate = [in_pack(policy, made, weights)[1] for made, weights in zip((first, second), ones, strict=True)]
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.zero_grad()
    total = policy(first)[0].sum() + policy(second)[0].sum()
    with torch.no_grad():
        tiny_model(kind, "eager")(input_ids=torch.arange(3, 20)[None], use_cache=False)
    total.backward()
    for name, gradient in gradients(policy.model).items():
        wanted = separate[0][name] + separate[1][name]
        assert (gradient - wanted).abs().max() < GRADIENTS * (wanted.abs().max() + 1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_have_the_mixers(kind: str) -> None:
    layers = layers_of(tiny_config(kind), trust_remote_code=False)
    assert layers.mixers == MIXERS[kind]
    assert not layers.unsupported


def test_a_release_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2", VARLEN)
    monkeypatch.delattr("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn")
    with pytest.raises(RunError, match="Lfm2ShortConv cannot be packed: this version of transformers has no causal"):
        bind_mixers(model.get_decoder())


def test_each_run_is_preceded_by_what_it_continues() -> None:
    """Runs of 3 and 2 tokens, the second behind the first, and a sequence of 1."""
    index = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    runs = MixerRuns(Runs(torch.tensor([0, 3, 5, 6]), torch.tensor([0, 3, 8, 9]), 3, 5, index))
    context, own = runs.context(2)
    assert context.tolist() == [6, 6, 0, 1, 2, 1, 2, 3, 4, 6, 6, 5]
    assert own.tolist() == [2, 3, 4, 7, 8, 11]
    assert runs.context(4)[0].tolist() == [6, 6, 6, 6, 0, 1, 2, 6, 0, 1, 2, 3, 4, 6, 6, 6, 6, 5]
