"""Models that run with Liger's kernels, and the parts that are replaced; Liger's function is a fake."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.llama import modeling_llama

from rlhf_cli.errors import UsageError
from rlhf_cli.models.fused import OLDEST, by_device, fuse, fused_kernels, uses_fused_kernels

CAN = {"on_gpu": True, "compiled": False, "installed": True}


def test_a_kernel_for_mlps_is_left_out_if_the_activation_is_another_one():
    assert fused_kernels(LlamaConfig()) == ("rms_norm", "rope", "swiglu")
    assert fused_kernels(LlamaConfig(hidden_act="relu")) == ("rms_norm", "rope")
    assert fused_kernels(GemmaConfig(hidden_act="gelu_pytorch_tanh")) == ("rms_norm", "rope", "geglu")
    assert fused_kernels(Qwen3MoeConfig()) == ("rms_norm", "rope")


@pytest.mark.parametrize(
    ("change", "config", "sentence"),
    [
        ({"on_gpu": False}, LlamaConfig(), "needs an NVIDIA GPU"),
        ({"installed": False}, LlamaConfig(), "is not installed"),
        ({"compiled": True}, LlamaConfig(), "cannot be combined with compile_model"),
        ({}, Qwen3NextConfig(), "no kernels for models of type qwen3_next"),
    ],
)
def test_what_cannot_be_used_is_skipped_by_default_and_refused_if_asked_for(change, config, sentence):
    assert not uses_fused_kernels(None, config, **{**CAN, **change})
    assert not uses_fused_kernels(False, config, **{**CAN, **change})
    with pytest.raises(UsageError, match=sentence):
        uses_fused_kernels(True, config, **{**CAN, **change})


@pytest.mark.parametrize(("wanted", "used"), [(None, True), (True, True), (False, False)])
def test_kernels_that_fit_are_used_by_default(wanted, used):
    assert uses_fused_kernels(wanted, LlamaConfig(), **CAN) is used


def test_only_this_decoder_is_changed_and_no_loss(capsys):
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=5)
    )
    plain, norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm
    given: dict[str, Any] = {}

    def apply(*, model, rope=False, rms_norm=False, swiglu=False, **losses):
        given.update(model=model, rope=rope, rms_norm=rms_norm, swiglu=swiglu, **losses)
        vars(modeling_llama).update(apply_rotary_pos_emb="fused", LlamaRMSNorm=None)

    try:
        fuse(model, apply=apply)
        assert modeling_llama.LlamaRMSNorm is norm
        model(torch.tensor([[1, 2]]))  # on a CPU the rotary function stays that of transformers
    finally:
        vars(modeling_llama).update(apply_rotary_pos_emb=plain)
    assert given.pop("model") is model.get_decoder()
    off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert given == off | {"rope": True, "rms_norm": True, "swiglu": True}
    assert capsys.readouterr().out == "Liger kernels: rms_norm, rope, swiglu\n"


def test_the_rotary_function_goes_by_the_device():
    rotate = by_device(lambda query: "fused", lambda query: "plain")
    assert [rotate(SimpleNamespace(is_cuda=on_gpu)) for on_gpu in (True, False)] == ["fused", "plain"]


def test_a_gpu_without_fused_kernels_logs_why(capsys):
    config = LlamaConfig()
    assert not uses_fused_kernels(None, config, **{**CAN, "installed": False})
    assert (
        capsys.readouterr().out
        == f"Liger kernels are off: use_liger_kernel: liger-kernel {OLDEST} or newer is not installed (extra `liger`)\n"
    )
    assert uses_fused_kernels(None, config, **CAN)
    assert not uses_fused_kernels(None, config, **{**CAN, "on_gpu": False})
    assert capsys.readouterr().out == ""
