"""Models on packs, loading and saving."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    AyaVisionConfig,
    Cohere2Config,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    RwkvConfig,
)

from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.environment import dtype_of_processor, fast_dtype
from rlhf_cli.errors import UsageError, one_line
from rlhf_cli.models.adapters import load_with_adapter, plan_adapter
from rlhf_cli.models.cost import quadratic_cost
from rlhf_cli.models.dtypes import SLOW_BF16, dtype_note
from rlhf_cli.models.finding import find_model, resolve_model_path
from rlhf_cli.models.host_memory import keep_freed_memory
from rlhf_cli.models.loading import load_causal_lm, load_reward_model, load_value_backbone, num_parameters
from rlhf_cli.models.policy import PolicyModel, ValueModel, logit_transform, parameter_groups
from rlhf_cli.models.requirements import check_positions
from rlhf_cli.models.saving import end_at, save_hf, save_tokenizer
from rlhf_cli.models.tokenizers import load_tokenizer

COST_SHAPE: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def settings(pretrain, **changes):
    return ModelConfig(**({"pretrain": str(pretrain), "param_dtype": "fp32"} | changes))


def some_pack(lengths=(9, 1, 30)):
    generator = np.random.default_rng(0)
    sequences = []
    for length in lengths:
        mask = generator.random(length) < 0.7
        mask[0] = False
        sequences.append(TokenSequence(generator.integers(0, 250, length).astype(np.int32), mask))
    return pack(sequences)


def gradients(model, output):
    model.zero_grad()
    (output * torch.linspace(-1, 2, output.numel())).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def dense_logits(model, batch):
    """Return the logits of the whole model, one sequence at a time."""
    pieces = batch.input_ids_T.split(batch.cu_seqlens.diff().tolist())
    return torch.cat([model(input_ids=piece[None]).logits[0] for piece in pieces])


# Policy and value model


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
def test_policy_equals_the_hugging_face_model(fixture, request):
    folder = request.getfixturevalue(fixture)
    policy = PolicyModel(load_causal_lm(settings(folder)))
    batch = some_pack()
    logprobs, entropy = policy(batch, temperature=0.7, with_entropy=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_p = torch.log_softmax(dense_logits(model, batch)[batch.rows_K] / 0.7, -1)
    expected = log_p.gather(-1, batch.targets_K[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-5)
    expected_grads = gradients(model, expected)
    grads = gradients(policy, logprobs)
    assert set(grads) == {f"model.{name}" for name in expected_grads}
    for name, expected_grad in expected_grads.items():
        torch.testing.assert_close(grads[f"model.{name}"], expected_grad, atol=1e-4, rtol=1e-4)


def test_state_dict_has_hugging_face_names_behind_one_prefix(tiny_llama_dir):
    model = load_causal_lm(settings(tiny_llama_dir))
    assert set(PolicyModel(model).state_dict()) == {f"model.{name}" for name in model.state_dict()}


def test_pack_without_targets_gives_every_parameter_a_gradient_of_zero(tiny_model_dir):
    policy = PolicyModel(load_causal_lm(settings(tiny_model_dir)))
    value = ValueModel(load_value_backbone(settings(tiny_model_dir)))
    for model, output in ((policy, policy(pack([]))[0]), (value, value(pack([])))):
        assert output.shape == (0,)
        output.sum().backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_gradient_checkpointing_changes_nothing(tiny_model_dir):
    results = []
    for checkpointing in (False, True):
        policy = PolicyModel(load_causal_lm(settings(tiny_model_dir, gradient_checkpointing=checkpointing))).train()
        logprobs, _ = policy(some_pack())
        assert policy.model.is_gradient_checkpointing == checkpointing
        results.append((logprobs.detach(), gradients(policy, logprobs)))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)


def test_value_is_the_scalar_head_at_the_state_before_each_target(tiny_model_dir):
    model = load_value_backbone(settings(tiny_model_dir))
    with torch.no_grad():
        model.score.weight.copy_(torch.arange(32.0) / 32)
    batch = some_pack()
    hidden = dense_hidden(model, batch)
    values = ValueModel(model)(batch)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, hidden[batch.rows_K] @ (torch.arange(32.0) / 32), atol=1e-5, rtol=1e-5)


def dense_hidden(model, batch):
    pieces = batch.input_ids_T.split(batch.cu_seqlens.diff().tolist())
    reference = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([reference.model(input_ids=piece[None]).last_hidden_state[0] for piece in pieces])


SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=2.0, query_pre_attn_scalar=8)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
    ],
)
def test_what_a_model_does_to_its_logits_is_done_here_too(build):
    torch.manual_seed(0)
    model = build().eval()
    model.set_attn_implementation("eager")
    tokens = torch.arange(20) * 7 % 60
    batch = pack([TokenSequence(tokens.numpy().astype(np.int32), np.arange(20) > 3)])
    logprobs, _ = PolicyModel(model)(batch)
    log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
    expected = log_p[:-1].gather(-1, tokens[1:, None]).squeeze(-1)[3:]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert logit_transform(model.config) != logit_transform(LlamaConfig())


def test_vectors_have_no_weight_decay_and_tied_weights_appear_once(tiny_model_dir):
    policy = PolicyModel(load_causal_lm(settings(tiny_model_dir)))
    policy.model.model.layers[0].mlp.requires_grad_(False)
    decayed, plain = (dict[str, Any](group) for group in parameter_groups(policy, 0.1))
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in plain["params"]} == {1}
    grouped = [id(parameter) for parameter in decayed["params"] + plain["params"]]
    assert sorted(grouped) == sorted(id(p) for p in policy.parameters() if p.requires_grad)


@pytest.mark.slow
def test_compiled_decoder_equals_the_plain_one_on_changing_packs_with_one_compilation(tiny_model_dir):
    plain = PolicyModel(load_causal_lm(settings(tiny_model_dir))).train()
    compiled = PolicyModel(load_causal_lm(settings(tiny_model_dir, compile_model=True))).train()
    assert set(compiled.state_dict()) == set(plain.state_dict())
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for lengths in ((9, 1, 30), (4, 5), (17, 3, 8, 60), (200,)):
        found, expected = compiled(some_pack(lengths))[0], plain(some_pack(lengths))[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        grads = gradients(compiled, found)
        for name, expected_grad in gradients(plain, expected).items():
            torch.testing.assert_close(grads[name], expected_grad, atol=1e-4, rtol=1e-4)
    assert graphs["unique_graphs"] - before == 1


# Loading


def test_run_directory_stands_for_its_model(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert resolve_model_path(str(tmp_path)) == str(tmp_path / "model")


def test_hub_name_is_left_alone(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [("an address",)])
    assert resolve_model_path("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "not a name"])
def test_hub_name_without_a_network_is_refused_before_anything_is_tried(monkeypatch, name):
    def no_network(*_: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("rlhf_cli.models.finding.getproxies", dict)
    with pytest.raises(UsageError, match=f"pretrain '{name}': there is no such folder here, and no connection"):
        find_model(ModelConfig(pretrain=name))


def test_hub_name_that_the_hub_does_not_give_is_refused_in_one_sentence():
    program = (
        "import socket\n"
        "socket.getaddrinfo = lambda *_: [('an address',)]\n"
        "from rlhf_cli.config.model import ModelConfig\n"
        "from rlhf_cli.models.finding import find_model\n"
        "find_model(ModelConfig(pretrain='no-such-org/no-such-model'))"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "UsageError: pretrain 'no-such-org/no-such-model'" in last
    assert "not a local folder, and not available from the Hub" in last


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no config.json"),
        (["config.yaml"], "run directory without a finished model"),
        (["config.json"], "has a config.json but no weights"),
    ],
)
def test_folder_that_is_no_model_is_refused_with_what_is_missing(files, message, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=message):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [('{"model_type": ', r"Expecting value: line 1 column 16"), ("[]", "not a JSON object"), ("\xff", "utf-8")],
)
def test_a_broken_settings_file_of_a_model_is_named(name, text, fault, tmp_path):
    for file in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        UsageError, match=f"^{tmp_path / name} is not valid JSON .*{fault}|{name} is {fault}.*download the model"
    ):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "a/b/c", "gone/"])
def test_path_that_does_not_exist_is_refused(path):
    with pytest.raises(UsageError, match="no such folder"):
        resolve_model_path(path)


def test_file_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        resolve_model_path(str(tmp_path / "model.safetensors"))


def test_weights_that_lack_a_tensor_are_refused(tiny_llama_dir, tmp_path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"1 missing or with another shape, first model\.layers\.1\.mlp\.up_proj"):
        load_causal_lm(settings(folder))


def test_recurrent_models_are_refused_before_their_weights_are_read(tmp_path):
    RwkvConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("never read")
    with pytest.raises(UsageError, match="rwkv cannot be trained on packs: no attention layers"):
        load_causal_lm(settings(tmp_path))


def test_kernel_that_is_not_installed_is_refused_before_the_weights_are_read(tmp_path):
    Qwen2Config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("never read")
    if torch.cuda.is_available():
        pytest.skip("a GPU may have the kernel")
    with pytest.raises(UsageError, match="flash_attention_2"):
        load_causal_lm(settings(tmp_path, attn_implementation="flash_attention_2", param_dtype="bf16"))


def test_liger_needs_a_gpu(tiny_model_dir):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UsageError, match="use_liger_kernel needs an NVIDIA GPU"):
        load_causal_lm(settings(tiny_model_dir, use_liger_kernel=True))


@pytest.mark.parametrize("load", [load_causal_lm, load_value_backbone])
@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_weights_are_read_onto_the_device_that_is_asked_for(tiny_model_dir, load, device):
    """The meta device stands for a GPU, and weights that pass through host memory would not be on it."""
    model = load(settings(tiny_model_dir), device=device)
    assert {weight.device for weight in model.parameters()} == {device or torch.device("cpu")}


def test_a_reward_model_and_the_model_under_an_adapter_are_read_onto_the_device_too(tiny_model_dir, tmp_path):
    save_hf(load_value_backbone(settings(tiny_model_dir)), load_tokenizer(settings(tiny_model_dir)), tmp_path / "judge")
    meta = torch.device("meta")
    judge = load_reward_model(settings(tmp_path / "judge"), device=meta)
    plan = plan_adapter(settings(tiny_model_dir), LoraConfig(lora_rank=2), seed=1)
    adapted = load_with_adapter(load_causal_lm, settings(tiny_model_dir), plan, device=meta)
    assert {weight.device for model in (judge, adapted) for weight in model.parameters()} == {meta}


def test_fresh_value_head_is_small_and_always_the_same(tiny_model_dir):
    weights = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights.append(load_value_backbone(settings(tiny_model_dir)).score.weight.detach())
    assert torch.equal(*weights)
    assert weights[0].std().item() == pytest.approx(1 / 33, rel=0.4)


def test_trained_value_head_is_loaded(tiny_model_dir, tmp_path):
    model = load_value_backbone(settings(tiny_model_dir))
    with torch.no_grad():
        model.score.weight.fill_(0.5)
    save_hf(model, load_tokenizer(settings(tiny_model_dir)), tmp_path / "critic")
    assert torch.equal(load_value_backbone(settings(tmp_path / "critic")).score.weight, torch.full((1, 32), 0.5))


def test_a_reward_model_is_no_language_model_though_its_weights_would_load(tiny_model_dir, tmp_path):
    tokenizer = load_tokenizer(settings(tiny_model_dir))
    save_hf(load_value_backbone(settings(tiny_model_dir)), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").write_text("never read")
    with pytest.raises(UsageError, match="is Qwen2ForSequenceClassification, which returns scores: use a language"):
        load_causal_lm(settings(tmp_path))


def test_chat_template_comes_from_a_file_or_from_the_setting_itself(tiny_model_dir, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    for source in (str(tmp_path / "template.jinja"), "{{ messages[0].content }}!"):
        tokenizer = load_tokenizer(settings(tiny_model_dir, tokenizer_chat_template=source))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(UsageError, match="neither a file nor a Jinja template"):
        load_tokenizer(settings(tiny_model_dir, tokenizer_chat_template="absent.jinja"))


def test_no_padding_token_is_made_up(tiny_llama_dir, tmp_path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer_config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert load_tokenizer(settings(folder)).pad_token is None


def test_code_of_a_model_is_named_by_the_flag_that_allows_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match=r"review it, then set --trust_remote_code$"):
        find_model(settings(tmp_path))


def test_the_reason_of_a_library_is_quoted_beyond_its_first_line():
    with pytest.raises(ValueError, match="from one of") as raised:
        PreTrainedTokenizerFast()
    reason = one_line(raised.value)
    assert reason.startswith("Couldn't instantiate the backend tokenizer from one of: (1) a `tokenizers`")
    assert reason.endswith(
        "You need to have sentencepiece or tiktoken installed to convert a slow tokenizer to a fast one."
    )
    assert one_line(ValueError("x" * 1000)) == "x" * 497 + "..."
    assert one_line(KeyError()) == "KeyError"


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UsageError, match=r"the tokenizer has no vocabulary; a file such as tokenizer.json is missing"):
        load_tokenizer(settings(tmp_path))


def test_folder_without_tokenizer_is_refused(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer \(tokenizer.json\)"):
        load_tokenizer(settings(folder))


def test_attention_share_of_the_cost_by_hand():
    config = Qwen2Config(
        hidden_size=8,
        intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=100,
    )
    # Weights: 3 layers of q, o (8 x 8), k, v (8 x 2), three MLP matrices (8 x 10); head 8 x 100.
    weights = 3 * (2 * 64 + 2 * 16 + 3 * 80) + 800
    # Causal attention: 3 layers, 8 dimensions, scores and values, half of the square.
    assert quadratic_cost(config) == pytest.approx(3 * 8 * 2 / 2 / weights)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **COST_SHAPE), 2 * 10),
        (Qwen3MoeConfig(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=3, **COST_SHAPE), 4 * 3),
        (
            Qwen2MoeConfig(
                num_experts_per_tok=4, moe_intermediate_size=3, shared_expert_intermediate_size=7, **COST_SHAPE
            ),
            4 * 3 + 7,
        ),
        (DeepseekV3Config(num_experts_per_tok=4, moe_intermediate_size=3, n_shared_experts=2, **COST_SHAPE), 6 * 3),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_of_a_mixture_the_experts_that_a_token_takes_cost_something(config, width):
    dense = Qwen2Config(**{**COST_SHAPE, "intermediate_size": width}, head_dim=getattr(config, "head_dim", None))
    assert quadratic_cost(config) == pytest.approx(quadratic_cost(dense))


def test_layers_without_attention_cost_nothing_for_the_square():
    types = ["conv", "full_attention", "conv"]
    hybrid = Lfm2Config(**COST_SHAPE | {"num_hidden_layers": 3, "layer_types": types})
    dense = Lfm2Config(**COST_SHAPE | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    assert quadratic_cost(hybrid) == pytest.approx(quadratic_cost(dense) / 3)


def test_parameters_are_counted_once_and_whole(tiny_model_dir):
    model = load_causal_lm(settings(tiny_model_dir))
    assert num_parameters(model) == model.num_parameters()
    partitioned = torch.nn.Linear(2, 3, bias=False)
    partitioned.weight.ds_shape = torch.Size([20, 50])  # ZeRO-3 leaves this on a parameter that it has partitioned
    assert num_parameters(partitioned) == 1000


# Saving


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
@pytest.mark.parametrize("with_state_dict", [False, True])
def test_saved_model_loads_in_transformers_with_the_same_weights(fixture, with_state_dict, request, tmp_path):
    folder = request.getfixturevalue(fixture)
    model, tokenizer = load_causal_lm(settings(folder)), load_tokenizer(settings(folder))
    # Gathered weights are copies, so tied weights do not share memory.
    weights = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()} if with_state_dict else None
    save_hf(model, tokenizer, tmp_path / "out", state_dict=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = weights or model.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == model.config.tie_word_embeddings
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_saved_model_stops_at_the_end_of_a_turn_and_generates(tiny_model_dir, tmp_path):
    model, tokenizer = load_causal_lm(settings(tiny_model_dir)), load_tokenizer(settings(tiny_model_dir))
    model.generation_config.eos_token_id = 7
    model.generation_config.pad_token_id = None
    model.generation_config.temperature = 0.3  # transformers rejects this on saving without do_sample
    save_hf(model, tokenizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == [tokenizer.eos_token_id, 7]
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id
    assert loaded.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape[1] <= 7


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": False}),
        ({"temperature": 0.6, "top_k": 20}, {"do_sample": True, "temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6, "early_stopping": True}, {"do_sample": True, "temperature": 0.6}),
        ({"num_beams": 1, "length_penalty": 0.5}, {"num_beams": 1}),
        ({"output_scores": True, "max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"num_beams": 2, "length_penalty": 0.5}, {"num_beams": 2, "length_penalty": 0.5}),
        ({"use_cache": False, "cache_implementation": "static"}, {}),  # ambiguous
        ({"pad_token_id": -1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_a_model_whose_generation_settings_contradict_each_other_is_saved(given, kept, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, **given}))
    model, tokenizer = load_causal_lm(settings(folder)), load_tokenizer(settings(folder))
    save_hf(model, tokenizer, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    always = {"eos_token_id": [tokenizer.eos_token_id, 7], "pad_token_id": tokenizer.pad_token_id}
    unset = {"transformers_version", "_from_model_config", "output_attentions", "output_hidden_states", "use_cache"}
    assert {name: value for name, value in written.items() if name not in unset and value is not None} == always | kept


def test_generation_from_a_saved_folder_ends_at_the_end_of_turn_that_was_trained(tiny_model_dir, tmp_path):
    model, tokenizer = load_causal_lm(settings(tiny_model_dir)), load_tokenizer(settings(tiny_model_dir))
    prompt = torch.tensor([[1, 2, 3]])
    end = int(AutoModelForCausalLM.from_pretrained(tiny_model_dir)(prompt).logits[0, -1].argmax())
    assert end != tokenizer.eos_token_id
    end_at(model, (end,))
    save_hf(model, tokenizer, tmp_path / "out")
    save_tokenizer(model, tokenizer, tmp_path)  # as for an adapter
    assert eos_token_ids(tmp_path) == eos_token_ids(tmp_path / "out") == sorted({tokenizer.eos_token_id, end})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generate(prompt, max_new_tokens=9, do_sample=False).tolist() == [[1, 2, 3, end]]
    end_at(model, (end,))
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, end]


def test_saving_replaces_an_older_model_and_leaves_nothing_beside_it(tiny_model_dir, tmp_path):
    model, tokenizer = load_causal_lm(settings(tiny_model_dir)), load_tokenizer(settings(tiny_model_dir))
    target = tmp_path / "run" / "model"
    target.mkdir(parents=True)
    (target / "stale.txt").write_text("old")
    save_hf(model, tokenizer, target)
    assert os.listdir(tmp_path / "run") == ["model"]
    assert not (target / "stale.txt").exists()
    assert (target / "model.safetensors").is_file()


def test_save_that_fails_leaves_the_older_model_as_it_was(tiny_model_dir, tmp_path):
    model = load_causal_lm(settings(tiny_model_dir))
    target = tmp_path / "model"
    target.mkdir()
    (target / "kept.txt").write_text("old")

    class FullDisk:
        eos_token_id = pad_token_id = 3

        def save_pretrained(self, path):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_hf(model, FullDisk(), target)
    assert os.listdir(tmp_path) == ["model"]
    assert os.listdir(target) == ["kept.txt"]


def test_kept_memory_is_used_again_without_page_faults():
    resource = pytest.importorskip("resource")
    if not keep_freed_memory():
        pytest.skip("no glibc")

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64 * 2**20, dtype=torch.uint8)  # above all thresholds of glibc
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # 64 MiB are 16,384 pages; the first blocks still grow the heap.
    assert min(faults() for _ in range(10)) < 1000


@pytest.mark.parametrize(
    ("dtype", "is_fast", "has_gpu", "note"),
    [
        ("bf16", False, False, {"Note": SLOW_BF16}),
        ("bf16", False, True, {}),
        ("bf16", True, False, {}),
        ("fp32", False, False, {}),
    ],
)
def test_a_type_that_the_processor_is_slow_in_is_said(monkeypatch, dtype, is_fast, has_gpu, note):
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: is_fast)
    assert dtype_note(ModelConfig(pretrain="any", param_dtype=dtype), on_gpu=has_gpu) == note


@pytest.mark.parametrize(
    ("cpuinfo", "dtype", "because"),
    [
        ("model name : A\nflags\t\t: fpu avx512f amx_bf16 avx512_bf16\n", "bf16", "AMX"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", "bf16", "AVX512-BF16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16", "ARM"),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", "fp32", "no fast bf16 instructions"),
        ("bugs\t\t: bf16 amx_bf16\n", "fp32", "no fast bf16 instructions"),
        ("", "fp32", "no fast bf16 instructions"),
    ],
)
def test_the_type_is_bf16_where_the_processor_multiplies_it_fast(cpuinfo, dtype, because):
    chosen, reason = dtype_of_processor(cpuinfo)
    assert chosen == dtype
    assert because in reason


@pytest.mark.parametrize("given", [{}, {"param_dtype": "auto"}])
def test_a_chosen_type_is_kept_as_if_it_was_given_and_its_reason_is_said(given):
    chosen, reason = fast_dtype()
    config = ModelConfig(pretrain="any", **given)
    assert config.param_dtype == chosen
    assert config.model_dump()["param_dtype"] == chosen  # config.yaml, which a run on another machine uses to resume
    assert dtype_note(config, on_gpu=False) == {"Type": f"{chosen}: {reason}"}


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA_3 = LINEAR | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("architecture", "known"),
    [
        (Qwen2Config(max_position_embeddings=64), 64),
        (Qwen2Config(max_position_embeddings=64, rope_parameters=LINEAR), 128),
        (Qwen2Config(max_position_embeddings=64, rope_parameters=YARN), 64),
        (LlamaConfig(max_position_embeddings=64, rope_parameters=LLAMA_3), 64),
        (Gemma3TextConfig(max_position_embeddings=64), 64),
        (AyaVisionConfig(text_config=Cohere2Config(max_position_embeddings=64, model_max_length=96)), 96),
        (CohereConfig(max_position_embeddings=64, model_max_length=32), 32),
    ],
)
def test_vllm_is_asked_for_no_more_positions_than_it_takes(monkeypatch, architecture, known):
    check_positions(architecture, known)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    with pytest.raises(UsageError, match=rf"--max_len {known + 1}: the model has {known} positions \(m"):
        check_positions(architecture, known + 1)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_positions(architecture, known + 1)
