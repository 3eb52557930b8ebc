"""Layers that mix tokens, found by class."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_causal_models import tiny_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.mixers.layers import Layers, layers_of, mixers_note

CUSTOM_CODE = """
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model


class MixedConfig(Qwen2Config):
    model_type = "mixed"


class RunningMean(nn.Module):
    def forward(self, hidden_states, past_key_values=None, **kwargs):
        return hidden_states.cumsum(1), None


class Hidden(nn.Module):
    def forward(self, hidden_states):
        return hidden_states.cumsum(1)


class MixedModel(Qwen2Model):
    config_class = MixedConfig

    def __init__(self, config):
        super().__init__(config)
        if config.use_sliding_window:
            self.layers[0].self_attn = RunningMean()
        elif config.attention_dropout:
            self.layers[0].mlp = Hidden()


class MixedForCausalLM(Qwen2ForCausalLM):
    config_class = MixedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = MixedModel(config)
"""


@pytest.mark.parametrize(
    ("kind", "unsupported"),
    [
        ("qwen2", ()),
        ("lfm2", ()),
        ("gemma3_text", ()),
        ("recurrent_gemma", ()),
        ("minimax", ()),
        ("rwkv", ("RwkvFeedForward", "RwkvSelfAttention")),
        ("xlstm", ("xLSTMLayer",)),
        ("falcon_mamba", ("FalconMambaMixer",)),
        ("gptj", ("GPTJAttention",)),
        ("deepseek_v32", ("DeepseekV32Indexer",)),
    ],
)
def test_layers_are_judged_by_class(kind, unsupported):
    assert layers_of(tiny_config(kind), trust_remote_code=False).unsupported == unsupported


def save_custom(folder: Path, **settings: object) -> ModelConfig:
    """Save random weights with custom code: with RunningMean, with Hidden, or as Qwen2."""
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**shape, intermediate_size=48, num_key_value_heads=2, **settings)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    classes = {"AutoConfig": "mixed.MixedConfig", "AutoModelForCausalLM": "mixed.MixedForCausalLM"}
    own = config.to_dict() | {"model_type": "mixed", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "mixed.py").write_text(CUSTOM_CODE)
    return ModelConfig(pretrain=str(folder), param_dtype="fp32", trust_remote_code=True)


def test_custom_code_with_an_unknown_mixer_is_refused_before_its_weights_are_read(tmp_path):
    source = save_custom(tmp_path, use_sliding_window=True)
    (tmp_path / "model.safetensors").write_text("never read")
    with pytest.raises(UsageError, match="models of type mixed cannot be trained on packs: no support for RunningMean"):
        load_causal_lm(source)


def test_custom_code_that_mixes_sequences_elsewhere_is_refused(tmp_path):
    # Loading initializes nothing here: the layer that mixes tokens has no weights.
    source = save_custom(tmp_path, attention_dropout=0.5)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.0.mlp")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="MixedForCausalLM cannot be trained on packs: a sequence changes the next"):
        load_causal_lm(source)


def test_custom_code_that_keeps_sequences_apart_loads(tmp_path):
    assert type(load_causal_lm(save_custom(tmp_path))).__name__ == "MixedForCausalLM"


def test_a_gpu_without_kernels_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(1, ("Mamba 2", "gated delta net", "short convolution"), ())
    installed: set[str] = set()
    monkeypatch.setattr("rlhf_cli.models.mixers.layers.find_spec", lambda name: name if name in installed else None)
    assert mixers_note(layers, on_gpu=False) == {}
    note = mixers_note(layers, on_gpu=True)["Layers"]
    assert note.startswith("Mamba 2 and gated delta net in PyTorch code")
    assert note.endswith("'rlhf-cli[hybrid,mamba]'")
    installed.add("fla")
    assert mixers_note(layers, on_gpu=True)["Layers"].endswith("'rlhf-cli[mamba]'")
    installed.add("mamba_ssm")
    assert mixers_note(layers, on_gpu=True) == {}
