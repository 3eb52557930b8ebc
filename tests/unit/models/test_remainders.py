"""Parameters of mixers that files store in float32 are exact in bf16 models, in their pushes and in saved models."""

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mixers_in_packs import KINDS, sequences_of
from transformers import AutoTokenizer, PreTrainedModel

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender, weights_checksum
from rlhf_cli.backends.weight_sync.vllm_trainer import tensor_specs
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, persistent_buffers
from rlhf_cli.models.loading import load_causal_lm, load_value_backbone
from rlhf_cli.models.mixers.remainders import REMAINDERS, SummedTensors, remainders, save_remainders, with_remainders
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.weight_files import SafetensorsFiles

WITH_VECTORS = [kind for kind in KINDS if kind not in ("lfm2", "lfm2_moe", "minimax", "recurrent_gemma")]


@pytest.fixture
def published(tiny_hybrid_dir: Callable[[str], str], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that creates a folder in bf16, whose decays, time steps and gated norms are float32."""

    def create(kind: str) -> Path:
        folder = Path(shutil.copytree(tiny_hybrid_dir(kind), tmp_path / "published"))
        weights = load_file(folder / "model.safetensors")
        for name, tensor in weights.items():
            if in_float32(name):
                tensor += 0.1 * torch.randn(tensor.shape)
            else:
                weights[name] = tensor.bfloat16()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return create


def in_float32(name: str) -> bool:
    return name.endswith(("A_log", "dt_bias", ".D", *(f"{mixer}.norm.weight" for mixer in ("mamba", "mixer", "attn"))))


def loaded(folder: Path, dtype: str = "bf16") -> ModelConfig:
    return ModelConfig(pretrain=str(folder), param_dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WITH_VECTORS)
def test_float32_values_are_computed_with_trained_and_saved(
    kind: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    source, sequences = published(kind), sequences_of(22, 1, 39)
    model, before = load_causal_lm(loaded(source)), load_file(source / "model.safetensors")
    names = remainders(model).keys()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    save_hf(model, AutoTokenizer.from_pretrained(source), tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert after.keys() == before.keys()
    in_file = {name for name in before if in_float32(name)}
    assert {name for name in in_file if after[name].dtype == torch.float32} == in_file
    assert len(in_file) == len(names)
    assert all(torch.equal(after[name].float(), tensor.float()) for name, tensor in before.items())

    policy = PolicyModel(model)
    exact = policy(pack(sequences))[0]
    exact.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if name in names}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    for module in model.modules():
        module.__dict__.pop(REMAINDERS, None)
    assert not torch.equal(exact, policy(pack(sequences))[0])


def test_a_saved_engine_is_merged_with_its_remainders(published: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_causal_lm(loaded(published("qwen3_5_text")))
    save_remainders(model, tmp_path)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    save_file(weights, tmp_path / "engine.safetensors")
    summed = SummedTensors(SafetensorsFiles([tmp_path / "engine.safetensors"]), tmp_path)
    for name, tensor in with_remainders(model, weights.items()):
        assert summed.dtype(name) == tensor.dtype
        assert summed.shape(name) == tensor.shape
        assert torch.equal(summed.read(name), tensor)


def test_pushes_announce_float32(published: Callable[[str], Path]) -> None:
    model = load_causal_lm(loaded(published("granitemoehybrid")))
    specs = {spec.name: spec.dtype for spec in tensor_specs(model)}
    pushed = as_in_checkpoint(model, with_remainders(model, model.named_parameters()))
    assert {name: tensor.dtype for name, tensor in pushed} == specs
    assert specs["model.layers.0.mamba.A_log"] == torch.float32


def test_only_bf16_models_have_remainders(published: Callable[[str], Path]) -> None:
    folder = published("falcon_h1")
    assert not remainders(load_causal_lm(loaded(folder, "fp32")))
    assert remainders(load_value_backbone(loaded(folder)))


@pytest.mark.parametrize("kind", WITH_VECTORS)
def test_an_engine_takes_float32_values_from_a_push(
    kind: str, published: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = published(kind)
    model = load_causal_lm(loaded(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in remainders(model):
                parameter.add_(1)
    engine = TransformersEngine(str(folder), EngineSettings(max_model_len=64, dtype="bf16"))
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    requests = [GenerationRequest([5, 6, 7], seed=1), GenerationRequest([8, 9], seed=2)]

    async def pushed() -> list[Generation]:
        assert await engine.weight_checksum() == [weights_checksum(stored(load_causal_lm(loaded(folder))))]
        report = sender.send(stored(model), version=1)
        assert report.manifest is not None
        await engine.start_weight_update()
        await engine.update_weights(report.manifest)
        await engine.finish_weight_update(1)
        assert await engine.weight_checksum() == [report.checksum]
        return await engine.generate(requests, SamplingParams(max_new_tokens=3))

    generations = asyncio.run(pushed())
    sender.close()
    assert all(np.isfinite(generation.logprobs).all() for generation in generations)
    taken = dict(stored(engine._model))
    for name, tensor in stored(model):
        assert torch.equal(taken[name], tensor), name
    asyncio.run(engine.shutdown())


def stored(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    named = itertools.chain(model.named_parameters(), persistent_buffers(model))
    return as_in_checkpoint(model, with_remainders(model, ((name, tensor.detach()) for name, tensor in named)))
