"""Models with convolutions, recurrent layers or sparse attention in the transformers engine."""

import asyncio
import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_joining_rows import assert_same, run
from test_rollout_transformers import SETTINGS, largest_difference
from tiny_causal_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.backends.rollout.backend_choice import described, rollout_backend
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.policy import PolicyModel

SAMPLING = SamplingParams(max_new_tokens=12)
# Prompts of several lengths are padded, repeated ones share a prefill, and limits differ.
REQUESTS = [
    GenerationRequest([5 + index % 4] * (1 + 3 * (index % 4)), seed=index, max_new_tokens=3 + index)
    for index in range(9)
]

KINDS = [
    *(
        "bamba",
        "falcon_h1",
        "gemma4_text",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "olmo_hybrid",
    ),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
]


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v32"])
def test_a_hybrid_model_has_the_logprobs_of_a_plain_forward_pass(kind: str, tiny_hybrid_dir) -> None:
    path = tiny_hybrid_dir(kind)
    engine = TransformersEngine(path, SETTINGS)
    whole, _ = run(engine, REQUESTS, SAMPLING, rows=len(REQUESTS))
    model = AutoModelForCausalLM.from_pretrained(path)
    fix_model(model)
    with torch.no_grad():
        assert largest_difference(model, REQUESTS, [whole[number] for number in range(len(REQUESTS))], 1.0) < 2e-5
    # Rows leave, others join: states move with their rows.
    joined, shapes = run(engine, REQUESTS, SAMPLING, rows=3)
    assert max(rows for rows, _ in shapes) == 3
    assert_same(joined, whole)
    asyncio.run(engine.shutdown())


@pytest.mark.parametrize("kind", ["lfm2", "kimi_linear", "qwen3_5_text", "granitemoehybrid", "jamba"])
def test_kernels_for_gpus_are_not_called_on_a_cpu(
    kind: str, tiny_hybrid_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers binds flash-linear-attention, causal-conv1d and mamba-ssm at import if they are installed."""
    path = tiny_hybrid_dir(kind)
    model = AutoModelForCausalLM.from_pretrained(path)
    module = sys.modules[type(model).__module__]
    for name, function in [*vars(module).items()]:
        if hasattr(function, "__wrapped__") and getattr(function, "__module__", "") == module.__name__:
            torch_function = inspect.unwrap(function)
            if inspect.isfunction(torch_function) and torch_function.__module__ == module.__name__:
                monkeypatch.setattr(module, name, _kernel(torch_function))
    engine = TransformersEngine(path, SETTINGS)
    responses, _ = run(engine, REQUESTS, SAMPLING, rows=len(REQUESTS))
    policy = PolicyModel(model)
    with torch.no_grad():
        assert policy(pack([TokenSequence(np.arange(3, 9, dtype=np.int32), np.arange(6) > 0)]))[0].isfinite().all()
    assert len(responses) == len(REQUESTS)
    asyncio.run(engine.shutdown())


def _kernel(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def kernel(*args: object, **kwargs: object) -> object:
        raise AssertionError("0 active drivers")

    return kernel


@pytest.mark.parametrize(("missing", "rows"), [(0, 3), (1, 2)])
def test_states_count_as_memory_of_a_row(missing: int, rows: int, tiny_hybrid_dir) -> None:
    """Two convolutions with 3 positions of 32 channels in float32 are 768 bytes, a token of one layer 128 bytes."""
    engine = TransformersEngine(tiny_hybrid_dir("lfm2"), SETTINGS)
    requests = [GenerationRequest([5], seed=index) for index in range(9)]
    _, shapes = run(engine, requests, SAMPLING, rows=9, cache_bytes=3 * (768 + 13 * 128) - missing)
    assert max(shape[0] for shape in shapes) == rows
    asyncio.run(engine.shutdown())


@pytest.mark.parametrize(
    ("kind", "given", "has_gpus", "backend"),
    [
        ("lfm2", {}, False, "transformers"),
        ("falcon_h1", {}, False, "vllm"),
        ("granitemoehybrid", {}, False, "transformers"),  # with experts
        ("nemotron_h", {}, False, "transformers"),  # with experts
        ("nemotron_h", {}, True, "vllm"),
        ("lfm2", {}, True, "vllm"),
        ("lfm2", {"rollout_backend": "vllm"}, False, "vllm"),
        ("lfm2", {"vllm_args": '{"block_size": 32}'}, False, "vllm"),
        ("mamba", {}, True, "vllm"),
        ("qwen2", {}, False, "vllm"),
    ],
)
def test_on_a_cpu_vllm_is_not_the_default_for_models_with_states(
    kind: str, given: dict[str, str], has_gpus: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_vllm(monkeypatch, has_gpus=has_gpus)
    config = EngineConfig.model_validate(given)
    assert rollout_backend(config, tiny_config(kind)) == backend
    assert ("on a CPU vLLM neither runs" in described(config, backend)) == (backend == "transformers")


def pretend_vllm(monkeypatch: pytest.MonkeyPatch, *, has_gpus: bool) -> None:
    module = "rlhf_cli.backends.rollout.backend_choice"
    monkeypatch.setattr(f"{module}.is_vllm_installed", lambda: True)
    monkeypatch.setattr(f"{module}.may_have_gpus", lambda: has_gpus)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]}),
    ],
)
def test_on_a_cpu_vllm_is_the_default_for_mamba_2_without_experts(
    kind: str, layers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_vllm(monkeypatch, has_gpus=False)
    assert rollout_backend(EngineConfig(), AutoConfig.for_model(kind, **layers)) == "vllm"


def test_an_engine_that_cannot_run_a_model_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, has_gpus=False)
    with pytest.raises(UsageError, match="cannot run the experts of nemotron_h; use transformers"):
        rollout_backend(EngineConfig(rollout_backend="vllm"), tiny_config("nemotron_h"))
    for kind, way_out in (("mamba2", "use vLLM on a GPU"), ("minimax", "vLLM does not have them either")):
        with pytest.raises(UsageError, match=f"cannot generate with models of type {kind}.*: {way_out}"):
            rollout_backend(EngineConfig(rollout_backend="transformers"), tiny_config(kind))
        with pytest.raises(UsageError, match=f"no rollout engine runs models of type {kind}.*: vLLM"):
            rollout_backend(EngineConfig(), tiny_config(kind))


@pytest.mark.parametrize("kind", ["mamba", "recurrent_gemma", "rwkv"])
def test_types_whose_states_it_cannot_select_are_refused(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    with pytest.raises(UsageError, match=f"cannot generate with models of type {kind}.*: (use vLLM|vLLM does not)"):
        TransformersEngine(str(tmp_path), SETTINGS)
