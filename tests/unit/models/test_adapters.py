"""Adapters: trainable parameters, every ZeRO stage, disabling, saving, loading and resuming."""

import json
import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from adapted_models import foreign_adapter, load, settings
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_training import (
    CLOSE,
    Items,
    Layout,
    farthest,
    make_engine,
    make_sequences,
    train,
    train_plainly,
    weights_of,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.backends.roles.saved_models import describe_model, save_whole_model
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import (
    adapter_off,
    plan_adapter,
    require_language_model,
    save_adapter,
)
from rlhf_cli.models.finding import find_model, resolve_model_path
from rlhf_cli.models.loading import load_causal_lm, load_value_backbone, parameter_counts
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.models.weight_files import fingerprint
from rlhf_cli.runs.trained_model import trained_model

STAGES = (0, 1, 2, 3)
STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]


pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def items() -> Items:
    return Items(make_sequences(12))


def stir(model) -> None:
    """Change the adapter's weights so that it has an effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def trained_weights(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def some_pack():
    return pack(make_sequences(5))


def logprobs(model):
    with torch.no_grad():
        return PolicyModel(model)(some_pack())[0]


# On a model


def test_a_new_adapter_changes_nothing_and_has_two_factors_on_every_linear_layer(tiny_model_dir):
    model, plain = load(tiny_model_dir), load_causal_lm(settings(tiny_model_dir))
    torch.testing.assert_close(logprobs(model), logprobs(plain), atol=0, rtol=0)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    wanted = {f"{name}.{factor}.default.weight" for name in linear for factor in ("lora_A", "lora_B")}
    assert set(trained_weights(model)) == wanted
    shapes = {tuple(p.shape) for name, p in trained_weights(model).items() if "gate_proj" in name}
    assert shapes == {(4, 32), (48, 4)}


def test_the_seed_alone_decides_how_an_adapter_begins(tiny_model_dir):
    first = trained_weights(load(tiny_model_dir, seed=1))
    torch.rand(7)
    assert all(torch.equal(w, first[n]) for n, w in trained_weights(load(tiny_model_dir, seed=1)).items())
    assert not all(torch.equal(w, first[n]) for n, w in trained_weights(load(tiny_model_dir, seed=2)).items())


def test_an_adapter_is_on_the_layers_named(tiny_model_dir):
    model = load(tiny_model_dir, target_modules=["q_proj", "v_proj"])
    assert {name.split(".")[4] for name in trained_weights(model)} == {"q_proj", "v_proj"}


def test_what_an_adapter_adds_is_alpha_over_rank_times_its_factors(tiny_model_dir):
    model = load(tiny_model_dir, lora_rank=2, lora_alpha=6, target_modules=["gate_proj"])
    layer = model.model.layers[0].mlp.gate_proj
    stir(model)
    x = torch.randn(3, 32)
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + x @ (6 / 2 * change).T)


def test_rslora_divides_by_the_root_of_the_rank(tiny_model_dir):
    model = load(tiny_model_dir, lora_rank=4, lora_alpha=6, use_rslora=True, target_modules=["gate_proj"])
    layer = model.model.layers[0].mlp.gate_proj
    stir(model)
    x = torch.randn(3, 32)
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + x @ (6 / 2 * change).T)


def test_dora_gives_each_row_its_own_length(tiny_model_dir):
    model = load(tiny_model_dir, lora_rank=2, lora_alpha=4, use_dora=True)
    plain = load_causal_lm(settings(tiny_model_dir))
    torch.testing.assert_close(logprobs(model), logprobs(plain))  # a new adapter changes nothing
    layer = model.model.layers[0].mlp.gate_proj
    stir(model)
    x = torch.randn(3, 32)
    whole = layer.base_layer.weight + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    lengths = layer.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(layer(x), x @ (lengths[:, None] * whole / whole.norm(dim=1, keepdim=True)).T)


def test_layers_are_excluded_by_name(tiny_model_dir):
    model = load(tiny_model_dir, exclude_modules=["o_proj", "layers.1.mlp.up_proj"])
    found = {name.partition(".lora_")[0] for name in trained_weights(model)}
    linear = {name for name, m in load_causal_lm(settings(tiny_model_dir)).named_modules() if isinstance(m, nn.Linear)}
    excluded = {name for name in linear if name.endswith(("o_proj", "layers.1.mlp.up_proj"))}
    assert found == linear - excluded - {"lm_head"}


def test_an_excluded_layer_that_is_not_there_is_named(tiny_model_dir):
    with pytest.raises(UsageError, match="exclude_modules: no layer is named query_proj; available: down_proj, "):
        load(tiny_model_dir, exclude_modules=["query_proj"])
    with pytest.raises(UsageError, match=r"target_modules, exclude_modules: .*(excluded|targeted)"):
        load(tiny_model_dir, target_modules=["q_proj"], exclude_modules=["q_proj"])


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_heads_and_embeddings_get_no_adapter(tiny_model_dir, name):
    with pytest.raises(UsageError, match=f"{name} does not support adapters"):
        load(tiny_model_dir, target_modules=[name])


def test_experts_get_no_adapter_and_the_refusal_names_what_to_give(tiny_moe_dir):
    with pytest.raises(
        UsageError, match=r"mlp.experts does not support adapters.* as in --target_modules q_proj,v_proj"
    ):
        load(tiny_moe_dir)
    load(tiny_moe_dir, target_modules=["q_proj", "v_proj"])


def test_a_layer_that_is_not_there_is_named(tiny_model_dir):
    with pytest.raises(UsageError, match=r"target_modules: .*query_proj"):
        load(tiny_model_dir, target_modules=["query_proj"])


def test_a_layer_that_does_not_exist_is_named_before_weights_are_read(tiny_model_dir, tmp_path):
    empty = shutil.copytree(tiny_model_dir, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({}, empty / "model.safetensors")
    given = LoraConfig(lora_rank=2, target_modules=["q_proj", "nonsense"])
    with pytest.raises(UsageError, match="target_modules: no layer is named nonsense; available: down_proj, "):
        trained_model(ModelConfig(pretrain=str(empty)), given, seed=0)
    with pytest.raises(UsageError, match="target_modules: no layer is named nonsense"):
        load(tiny_model_dir, target_modules=["q_proj", "nonsense"])


def test_switched_off_the_model_is_its_base_and_on_again_itself(tiny_model_dir):
    model, plain = load(tiny_model_dir), load_causal_lm(settings(tiny_model_dir))
    stir(model)
    changed = logprobs(model)
    with adapter_off(model):
        torch.testing.assert_close(logprobs(model), logprobs(plain), atol=0, rtol=0)
    assert torch.equal(logprobs(model), changed)
    assert not torch.allclose(changed, logprobs(plain), atol=1e-3)
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)


def test_base_under_the_adapter_is_the_same_memory(tiny_model_dir):
    model = load(tiny_model_dir)
    total = sum(p.numel() for p in model.parameters())
    plain = sum(p.numel() for p in load_causal_lm(settings(tiny_model_dir)).parameters())
    assert total == plain + sum(p.numel() for p in trained_weights(model).values())


def test_gradient_checkpointing_changes_no_gradient_of_an_adapter(tiny_model_dir):
    results = []
    for checkpointing in (False, True):
        # Without checkpointing the last MLP sees fewer tokens, which would change the random numbers.
        adapter = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3}
        model = load(tiny_model_dir, **adapter, model={"gradient_checkpointing": checkpointing}).train()
        stir(model)
        runs: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(3)
        PolicyModel(model)(some_pack())[0].sum().backward()
        results.append({name: p.grad for name, p in trained_weights_with_grad(model)})
        assert len(runs) == 1 + checkpointing
    assert all(grad.any() for grad in results[0].values())
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)


def trained_weights_with_grad(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def test_the_terminal_is_told_how_much_is_trained(tiny_model_dir):
    model = load(tiny_model_dir, lora_rank=1, target_modules=["q_proj"])
    assert parameter_counts(model) == "0.0M parameters, 0.000128M trainable"  # 2 layers, 32 in, 32 out
    assert parameter_counts(load_causal_lm(settings(tiny_model_dir))) == "0.0M parameters"


@pytest.mark.parametrize(
    "given",
    [
        {"lora_alpha": 32},
        {"lora_dropout": 0.1},
        {"target_modules": ["q_proj"]},
        {"use_rslora": True},
        {"use_dora": True},
        {"exclude_modules": ["q_proj"]},
    ],
)
def test_settings_of_an_adapter_are_refused_where_there_is_none(tiny_model_dir, given):
    with pytest.raises(UsageError, match=f"{next(iter(given))} requires an adapter: set --lora_rank"):
        load(tiny_model_dir, lora_rank=0, **given)


def test_4_bits_are_refused_without_a_gpu_and_without_an_adapter(tiny_model_dir):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UsageError, match="load_in_4bit needs an NVIDIA GPU"):
        load(tiny_model_dir, load_in_4bit=True)
    with pytest.raises(UsageError, match="set --lora_rank"):
        load(tiny_model_dir, lora_rank=0, load_in_4bit=True)


# In training


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_equal_plain_pytorch_and_only_the_adapter_moves(tiny_model_dir, items, stage, use_dora):
    plain = load(tiny_model_dir, use_dora=use_dora)
    expected = train_plainly(PolicyModel(plain), items, STEPS)
    expected_weights = {name: weight.detach() for name, weight in plain.named_parameters()}

    model = load(tiny_model_dir, stage, use_dora=use_dora)
    engine = make_engine(PolicyModel(model), stage)
    before = weights_of(engine, model)
    metrics = train(engine, items, STEPS, Layout())
    after = weights_of(engine, model)

    for got, wanted in zip(metrics, expected, strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    assert farthest(after, expected_weights) < CLOSE
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loaded_engine_goes_on_bit_for_bit_from_a_checkpoint_without_the_base(
    tiny_model_dir, items, tmp_path, stage, dtype
):
    model = load(tiny_model_dir, stage, dtype=dtype, lora_dropout=0.2)
    engine = make_engine(PolicyModel(model), stage, dtype=dtype)
    seed_everything(5)
    train(engine, items, STEPS[:2], Layout(max_tokens=30))
    engine.save(tmp_path)
    kept = [torch.load(path, weights_only=False)["module"] for path in tmp_path.rglob("*model_states.pt")]
    assert kept
    assert all("lora_" in name for module in kept for name in module)
    states = sum(path.stat().st_size for path in tmp_path.rglob("*_states.pt"))
    size = 4 if dtype == "fp32" else 2
    trained = sum(weight.numel() for _, weight in engine.named_weights(model, only_trained=True))
    whole = sum(weight.numel() for _, weight in engine.named_weights(model))
    assert engine.checkpoint_bytes() == trained * (12 + size)
    assert states == pytest.approx(engine.checkpoint_bytes(), abs=60_000)
    assert size * (whole - trained) > 45_000
    metrics = train(engine, items, STEPS[2:] + STEPS[:1], Layout(max_tokens=30))

    seed_everything(6)
    other = load(tiny_model_dir, stage, dtype=dtype, lora_dropout=0.2, seed=9)
    resumed = make_engine(PolicyModel(other), stage, dtype=dtype)
    resumed.load(tmp_path)
    assert train(resumed, items, STEPS[2:] + STEPS[:1], Layout(max_tokens=30)) == metrics
    expected, got = weights_of(engine, model), weights_of(resumed, other)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_in_training_is_the_base_at_every_step(tiny_model_dir, items, stage):
    expected = logprobs(load_causal_lm(settings(tiny_model_dir)))
    model = load(tiny_model_dir, stage)
    engine = make_engine(PolicyModel(model), stage)
    batch = some_pack()
    apart = []

    def loss(module, one):
        with torch.no_grad(), adapter_off(module):
            reference_K, _ = module(one)
        policy_K, _ = module(one)
        torch.testing.assert_close(reference_K, expected, atol=1e-5, rtol=1e-5)
        apart.append(float((policy_K - reference_K).detach().abs().max()))
        return (policy_K - reference_K).square().mean() - policy_K.mean(), {}

    for _ in range(3):
        engine.train_step([batch, batch], loss)
    assert apart[0] < 1e-5
    assert min(apart[2:]) > 1e-5


# Saving and loading


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_saved_adapter_is_what_peft_loads(tiny_model_dir, items, tmp_path, stage):
    model = load(tiny_model_dir, stage)
    engine = make_engine(PolicyModel(model), stage)
    train(engine, items, STEPS, Layout())
    [expected] = engine.infer([some_pack()], lambda module, batch: module(batch)[0])
    save_whole_model(engine, model, load_tokenizer(settings(tiny_model_dir)), tmp_path / "model")

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="varlen")
    loaded = PeftModel.from_pretrained(base, tmp_path / "model").eval()
    torch.testing.assert_close(logprobs(loaded.base_model.model), expected, atol=1e-5, rtol=1e-5)
    assert sorted(os.listdir(tmp_path)) == ["model"]
    stored = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == tiny_model_dir
    assert {"q_proj", "down_proj"} <= set(stored["target_modules"])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").get_adapter_state_dict()


def saved(model, pretrain, path):
    save_adapter(model, load_tokenizer(settings(pretrain)), path, state_dict=trained_weights(model))
    return path


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(tiny_model_dir, tmp_path):
    folder = saved(load(tiny_model_dir), tiny_model_dir, tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    expected, found = (load_tokenizer(settings(path)) for path in (tiny_model_dir, folder))
    assert found.get_vocab() == expected.get_vocab()
    assert found.chat_template == expected.chat_template


@pytest.mark.parametrize("variant", [{}, {"use_dora": True, "use_rslora": True, "exclude_modules": ["o_proj"]}])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_is_trained_further_from_its_folder_or_its_run(tiny_model_dir, items, tmp_path, stage, variant):
    model = load(tiny_model_dir, lora_alpha=3, **variant)
    stir(model)
    saved(model, tiny_model_dir, tmp_path / "run" / "model")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        again = load(path, stage, lora_rank=0)
        assert again.peft_config["default"].lora_alpha == 3
        engine = make_engine(PolicyModel(again), stage)
        [result] = engine.infer([some_pack()], lambda module, batch: module(batch)[0])
        torch.testing.assert_close(result, logprobs(model), atol=1e-5, rtol=1e-5)
        metrics = train(engine, items, STEPS[:1], Layout())
        assert metrics[0]["grad_norm"] > 0


def test_an_adapter_for_another_base_is_refused(tiny_model_dir, tmp_path):
    folder = saved(load(tiny_model_dir), tiny_model_dir, tmp_path / "adapter")
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    with pytest.raises(UsageError, match=r"was trained on a different base: the weights at .*other have fingerprint"):
        load(folder, lora_rank=0)


PEERS: dict[str, dict[str, Any]] = {
    "trl": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "llama_factory": {"r": 4, "target_modules": ["q_proj", "gate_proj"], "use_rslora": True, "lora_dropout": 0.1},
    "unsloth": {"r": 8, "target_modules": r".*\.layers\.\d+\.(self_attn|mlp)\.(q_proj|up_proj)", "lora_alpha": 8},
    "patterns": {
        "r": 4,
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 32},
    },
}
"""Adapter configs as written by other tools."""


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_of_other_tools_compute_the_same_here_are_trained_further_and_saved(
    tiny_model_dir, items, tmp_path, peer, stage
):
    foreign = foreign_adapter(tiny_model_dir, tmp_path / "adapter", **PEERS[peer])
    model = load(tmp_path / "adapter", stage, lora_rank=0)
    engine = make_engine(PolicyModel(model), stage)
    [result] = engine.infer([some_pack()], lambda module, batch: module(batch)[0])
    torch.testing.assert_close(result, logprobs(foreign.base_model.model), atol=1e-5, rtol=1e-5)
    train(engine, items, STEPS[:1], Layout())
    [trained] = engine.infer([some_pack()], lambda module, batch: module(batch)[0])
    assert (trained - result).abs().max() > 1e-4
    save_whole_model(engine, model, load_tokenizer(settings(tiny_model_dir)), tmp_path / "saved")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "saved"))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="varlen"), tmp_path / "saved"
    )
    torch.testing.assert_close(logprobs(again.eval().base_model.model), trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, r"with fully trained layers \(embed_tokens, lm_head\)"),
        ({"init_lora_weights": "pissa"}, "modified its base model at initialization .init_lora_weights pissa"),
        ({"bias": "all"}, "trains model biases .bias all"),
        ({"lora_bias": True}, "uses LoRA biases .lora_bias"),
        ({"trainable_token_indices": [3]}, "uses trainable embedding rows .trainable_token_indices"),
    ],
)
def test_adapters_with_unknown_parts_are_refused_with_the_reason(tiny_model_dir, tmp_path, changes, message):
    folder = saved(load(tiny_model_dir), tiny_model_dir, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UsageError, match=message):
        load(folder, lora_rank=0)


def test_an_adapter_on_a_quantised_model_names_the_way_to_a_whole_one(tiny_model_dir, tmp_path):
    base = shutil.copytree(tiny_model_dir, tmp_path / "bnb-4bit")
    foreign_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(
        UsageError,
        match=r"bnb-4bit is quantized \(bitsandbytes\): merge it into the 16-bit original with `rlhf merge --base`",
    ):
        load(tmp_path / "adapter", lora_rank=0)


def test_an_adapter_of_peft_alone_is_loaded_and_one_of_other_shapes_refused(tiny_model_dir, tiny_llama_dir, tmp_path):
    foreign = foreign_adapter(tiny_model_dir, tmp_path / "adapter", r=3, target_modules=["q_proj"])
    shutil.copy(f"{tiny_model_dir}/tokenizer.json", tmp_path / "adapter")
    torch.testing.assert_close(logprobs(load(tmp_path / "adapter", lora_rank=0)), logprobs(foreign.base_model.model))

    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = {name: tensor[:, :-1] if "lora_A" in name else tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    with pytest.raises(UsageError, match=r"does not match its base model: check .*q_proj\.lora_A"):
        load(tmp_path / "adapter", lora_rank=0)


def test_another_rank_than_the_adapters_is_refused(tiny_model_dir, tmp_path):
    folder = saved(load(tiny_model_dir, lora_rank=4), tiny_model_dir, tmp_path / "adapter")
    with pytest.raises(UsageError, match="is an adapter of rank 4, not 8: omit --lora_rank"):
        load(folder, lora_rank=8)


def test_an_adapter_whose_base_is_gone_says_so(tiny_model_dir, tmp_path):
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    folder = saved(load(base), base, tmp_path / "adapter")
    shutil.rmtree(base)
    with pytest.raises(UsageError, match=r"its base model cannot be found: .*there is no such folder"):
        load(folder, lora_rank=0)


def test_commands_without_adapters_name_the_way_to_a_whole_model(tiny_model_dir, tmp_path):
    folder = saved(load(tiny_model_dir), tiny_model_dir, tmp_path / "adapter")
    with pytest.raises(UsageError, match="is an adapter, not a full model: merge it"):
        resolve_model_path(str(folder))


def test_a_fingerprint_is_of_weights_and_not_of_how_files_are_cut(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    mark = fingerprint(tmp_path / "cut")
    stored = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for is_zip in (True, False):  # torch before 1.6 wrote another format
        folder = tmp_path / f"whole_{is_zip}"
        folder.mkdir()
        torch.save(stored, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        assert fingerprint(folder) == mark


# Heads


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_head_is_trained_and_saved_whole_with_its_adapter(tiny_model_dir, tmp_path, stage):
    model = load(tiny_model_dir, stage, kind=load_value_backbone)
    assert "score.weight" in trained_weights(model)
    engine = make_engine(ValueModel(model), stage)
    before = weights_of(engine, model)
    totals = StepTotals(some_pack().targets_K.numel(), 5)

    def loss(module, batch):
        return (module(batch) - 1).square().sum() / totals.num_tokens, {}

    for _ in range(2):
        engine.train_step([some_pack()], loss)
    after = weights_of(engine, model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name or name == "score.weight"}
    save_whole_model(engine, model, load_tokenizer(settings(tiny_model_dir)), tmp_path / "model")
    [expected] = engine.infer([some_pack()], lambda module, batch: module(batch))

    again = load(tmp_path / "model", stage, lora_rank=0, kind=load_value_backbone)
    engine = make_engine(ValueModel(again), stage)
    [result] = engine.infer([some_pack()], lambda module, batch: module(batch))
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)
    assert float(np.abs(result.numpy()).max()) > 0


def test_peft_loads_a_head_saved_with_its_adapter(tiny_model_dir, tmp_path):
    model = load(tiny_model_dir, kind=load_value_backbone)
    stir(model)
    folder = saved(model, tiny_model_dir, tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


def test_the_adapter_of_a_reward_model_is_not_trained_as_a_language_model(tiny_model_dir, tmp_path):
    folder = saved(load(tiny_model_dir, kind=load_value_backbone), tiny_model_dir, tmp_path / "adapter")
    plan = plan_adapter(settings(folder), LoraConfig(), seed=1)
    with pytest.raises(UsageError, match="is a reward model adapter, which returns scores"):
        require_language_model(settings(folder), find_model(settings(tiny_model_dir)).architecture, plan)
    with pytest.raises(UsageError, match=r"does not match its base model: check base_model\.model\.score\.weight"):
        load(folder, lora_rank=0)
    for other in (None, plan_adapter(settings(tiny_model_dir), LoraConfig(lora_rank=4), seed=1)):
        require_language_model(settings(tiny_model_dir), find_model(settings(tiny_model_dir)).architecture, other)


def test_a_checkpoint_says_what_model_it_is_of(tiny_model_dir, tmp_path):
    model = load(tiny_model_dir)
    describe_model(model, load_tokenizer(settings(tiny_model_dir)), tmp_path)
    names = {path.name for path in (tmp_path / "huggingface").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert {"adapter_config.json", "adapter_base.json"} <= names
