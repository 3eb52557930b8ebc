"""Layers that mix tokens, found by class."""

import json

import pytest
from tiny_causal_models import tiny_config
from transformers import Qwen2Config

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


class MixedModel(Qwen2Model):
    config_class = MixedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers[0].self_attn = RunningMean()


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


def test_custom_code_with_an_unknown_mixer_is_refused_before_its_weights_are_read(tmp_path):
    config = Qwen2Config(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4).to_dict()
    classes = {"AutoConfig": "mixed.MixedConfig", "AutoModelForCausalLM": "mixed.MixedForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixed", "auto_map": classes}))
    (tmp_path / "mixed.py").write_text(CUSTOM_CODE)
    (tmp_path / "model.safetensors").write_text("never read")
    with pytest.raises(UsageError, match="models of type mixed cannot be trained on packs: no support for RunningMean"):
        load_causal_lm(ModelConfig(pretrain=str(tmp_path), trust_remote_code=True))


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
