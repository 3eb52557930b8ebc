"""Parameter names in checkpoints, compared with files that transformers writes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from rlhf_cli.backends.roles.saved_models import save_weights
from rlhf_cli.models.checkpoint_names import (
    as_in_checkpoint,
    copy_from_checkpoint,
    persistent_buffers,
    shapes_in_checkpoint,
)

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ACTIVE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **ACTIVE, num_experts=4, shared_expert_intermediate_size=20),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **ACTIVE, num_experts=4, head_dim=8),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE, **ACTIVE, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}
OF_EXPERT_3 = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "qwen2_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.down_proj",
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """Return (family, loaded model, tensors of its file)."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param])
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))]:
            tensor.normal_()
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    return request.param, loaded, load_file(folder / "model.safetensors")


def own_tensors(model):
    return {**dict(model.named_parameters()), **dict(persistent_buffers(model))}


def test_tensors_taken_one_by_one_have_names_and_values_of_the_file(saved):
    family, model, file = saved
    found = dict(as_in_checkpoint(model, own_tensors(model).items()))
    assert OF_EXPERT_3[family] in found
    assert found.keys() == file.keys()
    assert all(found[name].equal(file[name]) for name in file)


def test_shapes_are_known_without_the_data(saved):
    _, model, file = saved
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in own_tensors(model).items():
        found |= shapes_in_checkpoint(model, name, tuple(tensor.shape), tensor.dtype)
    assert list(found) == list(dict(as_in_checkpoint(model, own_tensors(model).items())))
    assert found == {name: tuple(tensor.shape) for name, tensor in file.items()}


def test_a_model_takes_the_tensors_of_a_file_in_place(saved):
    _, model, file = saved
    before = {name: tensor.clone() for name, tensor in own_tensors(model).items()}
    places = {name: tensor.data_ptr() for name, tensor in own_tensors(model).items()}
    for tensor in own_tensors(model).values():
        tensor.zero_()
    copy_from_checkpoint(model, own_tensors(model), file)
    assert all(tensor.equal(before[name]) for name, tensor in own_tensors(model).items())
    assert places == {name: tensor.data_ptr() for name, tensor in own_tensors(model).items()}


def test_tensors_of_a_dense_model_are_handed_on_as_they_are(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert [(name, id(tensor)) for name, tensor in as_in_checkpoint(model, model.named_parameters())] == [
        (name, id(tensor)) for name, tensor in model.named_parameters()
    ]


def test_what_training_saves_is_the_file_with_the_buffers(saved, tmp_path, tiny_model_dir, group_of_one):
    """Training gathers only parameters, but a model without its router biases cannot be loaded."""
    _, model, file = saved
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    save_weights(model.named_parameters(), model, tokenizer, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == file.keys()
    assert all(written[name].equal(file[name]) for name in file)
