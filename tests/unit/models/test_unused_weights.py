"""Weights that transformers does not load are in the saved model again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.models import unused_weights
from rlhf_cli.models.loading import load_causal_lm, load_value_backbone
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.unused_weights import copy_unused_weights
from rlhf_cli.models.weight_files import open_weights

UNUSED = {"mtp.fc.weight": torch.randn(3, 5), "mtp.norm.weight": torch.randn(5).bfloat16()}


@pytest.fixture
def published(tiny_hybrid_dir: Callable[[str], str], tmp_path: Path) -> Path:
    """Folder with multi-token prediction, and with a vision encoder as in published Qwen3.5."""
    folder = Path(shutil.copytree(tiny_hybrid_dir("qwen3_5_text"), tmp_path / "published"))
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | UNUSED | {"model.visual.norm.weight": torch.zeros(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def loaded(folder: Path) -> ModelConfig:
    return ModelConfig(pretrain=str(folder), param_dtype="fp32")


@pytest.mark.parametrize(("shard", "unused_bytes", "num_unused"), [("5GB", 2**30, 1), ("20KB", 60, 2)])
def test_multi_token_prediction_is_kept_through_two_runs(
    shard: str, unused_bytes: int, num_unused: int, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_weights, "SHARD_BYTES", unused_bytes)
    source, tokenizer = published, AutoTokenizer.from_pretrained(published)
    for name in ("first", "second"):
        model = load_causal_lm(loaded(source))
        plain = model.save_pretrained
        monkeypatch.setattr(model, "save_pretrained", lambda *a, plain=plain, **k: plain(*a, max_shard_size=shard, **k))
        torch.nn.init.normal_(model.model.norm.weight)
        save_hf(model, tokenizer, tmp_path / name)
        source = tmp_path / name
        weights = open_weights(source)
        assert len([*source.glob("model-unused-*")]) == num_unused
        assert set(weights.names()) == {*load_file(published / "model.safetensors")} - {"model.visual.norm.weight"}
        for unused, tensor in UNUSED.items():
            assert torch.equal(weights.read(unused), tensor)
        again = AutoModelForCausalLM.from_pretrained(source)
        assert torch.equal(again.model.norm.weight, model.model.norm.weight)


def test_without_its_origin_a_model_is_saved_all_the_same(
    published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_causal_lm(loaded(published))
    tokenizer = AutoTokenizer.from_pretrained(published)
    shutil.rmtree(published)
    save_hf(model, tokenizer, tmp_path / "saved")
    assert "multi-token prediction) are not saved" in caplog.text
    assert not set(UNUSED) & set(open_weights(tmp_path / "saved").names())


def test_reward_models_leave_it_out(published: Path, tmp_path: Path) -> None:
    copy_unused_weights(load_value_backbone(loaded(published)), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
