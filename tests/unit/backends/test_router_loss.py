"""The load-balancing loss of routers: formula, counted tokens, and training steps."""

import numpy as np
import pytest
import torch
from tiny_training import (
    CLOSE,
    LEARNING_RATE,
    OPTIM,
    Items,
    Layout,
    farthest,
    load_policy,
    make_engine,
    make_sequences,
    train,
    weights_of,
)
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_cli.algorithms.load_balance import balance_part, router_sums
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.errors import UsageError
from rlhf_cli.models import shape_bucketing
from rlhf_cli.models.policy import PolicyModel, parameter_groups
from rlhf_cli.models.routers import check_router_loss, token_weights
from rlhf_cli.models.shape_bucketing import rounded

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=8),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}
WITH_ROUTERS = OPTIM.model_copy(update={"aux_loss_coef": 0.5})
ONE_PACK = Layout()
SHORT_PACKS = Layout(max_tokens=30)


def test_rows_that_are_spread_evenly_have_a_loss_of_the_experts_they_take():
    logits = [torch.eye(4)[[0, 1, 2, 3]] * 20]
    sums = router_sums(logits, torch.ones(4), top_k=1)
    assert float(balance_part(sums, sums.counts_E, sums.num_rows)) == pytest.approx(1.0)


def test_a_loss_by_hand():
    # Probabilities of two tokens over two experts: (0.75, 0.25) and (0.6, 0.4); three sequences share the second.
    logits = [torch.tensor([[0.75, 0.25], [0.6, 0.4]]).log()]
    sums = router_sums(logits, torch.tensor([1.0, 3.0]), top_k=1)
    assert sums.counts_E.tolist() == [4.0, 0.0]
    assert sums.probabilities_E.tolist() == pytest.approx([0.75 + 1.8, 0.25 + 1.2])
    assert float(balance_part(sums, sums.counts_E, sums.num_rows)) == pytest.approx(2 * 1.0 * 2.55 / 4)


def test_parts_of_micro_batches_add_up_to_the_loss_of_transformers():
    torch.manual_seed(0)
    layers = [torch.randn(12, 6) for _ in range(3)]
    parts = [
        router_sums([layer[rows] for layer in layers], torch.ones(6), top_k=2) for rows in (slice(6), slice(6, 12))
    ]
    counts, num_rows = sum(part.counts_E for part in parts), sum(part.num_rows for part in parts)
    total = sum(balance_part(part, counts, num_rows) for part in parts)
    torch.testing.assert_close(total, load_balancing_loss_func(tuple(layers), 6, 2))


def padded(sequences: list[TokenSequence]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(sequence.token_ids.astype(np.int64))
        mask[row, : len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_pack_is_that_of_transformers_on_the_padded_sequences(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
    sequences = make_sequences(1)
    expected = model(**padded(sequences), output_router_logits=True).aux_loss
    policy = PolicyModel(model)
    assert policy.routers is not None
    with policy.routers.recorded() as found:
        policy(pack(sequences))
    (sums,) = found
    torch.testing.assert_close(balance_part(sums, sums.counts_E, sums.num_rows), expected)


# Tokens that count


def group() -> list[TokenSequence]:
    prompt = [7, 8, 9]
    return [
        TokenSequence(np.array([*prompt, *answer], dtype=np.int32), np.array([False] * 3 + [True] * len(answer)))
        for answer in ([1, 2], [3], [4, 5, 6])
    ]


def weights(batch: Pack, num_tokens: int | None = None) -> list[float]:
    return token_weights(batch, num_tokens=num_tokens or batch.input_ids_T.numel()).tolist()


def test_a_shared_prompt_counts_once_for_each_response():
    shared = pack_groups(group())
    assert shared.input_ids_T.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert weights(shared) == [3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert sum(weights(shared)) == sum(weights(pack(group())))


def test_filler_and_idle_packs_count_nothing(monkeypatch):
    monkeypatch.setattr(shape_bucketing, "has_bf16_products", lambda: True)
    batch = pack(group())
    filled = rounded(batch, torch.bfloat16)
    assert filled.input_ids_T.numel() == 64
    assert weights(batch, 64) == [1.0] * 15 + [0.0] * 49
    assert weights(pack([])) == [0.0]


# Steps


def steps(path: str, stage: int, layout: Layout, **model):
    items = Items(make_sequences(9))
    hf_model, module = load_policy(path, stage, **model)
    engine = make_engine(module, stage, optim=WITH_ROUTERS)
    metrics = train(engine, items, [range(7), [7, 8]], layout)
    return metrics, weights_of(engine, hf_model), len(items.sizes)


def train_plainly(path: str):
    """Train the same steps with transformers and PyTorch on padded sequences."""
    hf_model, _ = load_policy(path, 0, attn_implementation="eager")
    groups = parameter_groups(hf_model, OPTIM.l2)
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=OPTIM.adam_betas)
    sequences = make_sequences(9)
    found = []
    for chosen in (sequences[:7], sequences[7:]):
        batch = padded(chosen)
        output = hf_model(**batch, output_router_logits=True)
        log_p = output.logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        trained = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, sequence in enumerate(chosen):
            trained[row, : len(sequence)] = torch.from_numpy(sequence.loss_mask)
        loss = -log_p[trained[:, 1:]].mean()
        adam.zero_grad()
        (loss + WITH_ROUTERS.aux_loss_coef * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(hf_model.parameters(), OPTIM.max_norm)
        adam.step()
        found.append({"loss": loss.item(), "aux_loss": output.aux_loss.item()})
    return found, {name: weight.detach() for name, weight in hf_model.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "layout", "model"),
    [
        (0, ONE_PACK, {}),
        (2, SHORT_PACKS, {}),
        (3, SHORT_PACKS, {}),
        (3, SHORT_PACKS, {"gradient_checkpointing": True}),
    ],
    ids=["one pack", "short packs", "partitioned", "computed again"],
)
def test_steps_do_not_depend_on_how_they_are_cut_and_equal_plain_pytorch(
    tiny_moe_dir, group_of_one, stage, layout, model
):
    expected, expected_weights = train_plainly(tiny_moe_dir)
    metrics, found, num_packs = steps(tiny_moe_dir, stage, layout, **model)
    assert (num_packs > 2) == (layout is SHORT_PACKS)
    for step, plain in zip(metrics, expected, strict=True):
        assert {name: step[name] for name in plain} == pytest.approx(plain, rel=1e-5)
    assert farthest(found, expected_weights) < CLOSE


def test_without_a_weight_routers_are_not_recorded(tiny_moe_dir, group_of_one):
    items = Items(make_sequences(4))
    _, module = load_policy(tiny_moe_dir, 0)
    (metrics,) = train(make_engine(module, 0), items, [range(4)], ONE_PACK)
    assert "aux_loss" not in metrics


@pytest.mark.parametrize("config", [Qwen2Config(), DeepseekV3Config()], ids=["dense", "balanced by biases"])
def test_models_without_a_router_loss_are_refused_by_name(config):
    check_router_loss(0.0, config)
    with pytest.raises(UsageError, match=f"--aux_loss_coef 0.01: models of type {config.model_type} have no router"):
        check_router_loss(0.01, config)


def test_mixtures_with_a_router_loss_are_taken():
    for config in FAMILIES.values():
        check_router_loss(0.01, config)
