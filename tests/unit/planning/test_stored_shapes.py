"""Shapes from files of a folder, compared with the model on PyTorch's meta device."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_causal_models import tiny_config, tiny_text_only_config
from tiny_vision import TINY_FAMILIES, save_tiny_vision
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig

from rlhf_cli.models.loading import language_model_class
from rlhf_cli.planning.architectures import find_shape, read_config
from rlhf_cli.planning.shapes import ModelShape, shape_of
from rlhf_cli.planning.stored_shapes import _TYPES, stored_shape

TEXT_ONLY = [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("internvl", "qwen3"), ("lfm2_vl", "lfm2")]
TEXT_ONLY += [("qwen3_vl_moe", "qwen3_vl_moe_text")]
IN_PARTS = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Language models that exist only in a vision-language model."""


def save(config: PretrainedConfig, folder: Path, **settings: Any) -> Path:
    language_model_class(config).from_config(config, dtype=torch.bfloat16).save_pretrained(folder, **settings)
    return folder


def sizes(shape: ModelShape | None) -> dict[str, Any]:
    assert shape is not None
    return asdict(shape) | {"linears": sorted(shape.linears)}


def assert_equal(folder: Path) -> None:
    found = sizes(stored_shape(folder, read_config(folder)))
    assert found == sizes(shape_of(AutoConfig.from_pretrained(folder)))


@pytest.mark.parametrize("kind", sorted(_TYPES.keys() - set(IN_PARTS)))
def test_a_language_model_has_the_shape_of_the_meta_device(kind, tmp_path):
    assert_equal(save(tiny_config(kind), tmp_path))


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_a_model_that_reads_images_has_the_shape_of_the_meta_device(kind, tmp_path):
    assert_equal(save_tiny_vision(kind, tmp_path))


@pytest.mark.parametrize("kinds", TEXT_ONLY)
def test_a_language_model_with_an_unused_encoder_has_the_shape_of_the_meta_device(kinds, tmp_path):
    assert_equal(save(tiny_text_only_config(*kinds), tmp_path))


@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "lfm2"])
def test_tied_heads_and_shards_have_the_shape_of_the_meta_device(kind, tmp_path):
    config = tiny_config(kind)
    config.tie_word_embeddings = True
    save(config, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal(tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_5_text"])
def test_a_reward_model_counts_as_the_language_model_that_it_replaces(kind, tmp_path):
    config = tiny_config(kind)
    config.num_labels = 1
    made = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path)
    assert_equal(tmp_path)


def _with_old_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as transformers 4.49 wrote it for Qwen2.5-VL."""
    vision = {name: value for name, value in values["vision_config"].items() if name != "model_type"}
    text = {
        name: value for name, value in values["text_config"].items() if name not in ("model_type", "rope_parameters")
    }
    top = {name: value for name, value in values.items() if name not in ("text_config", "transformers_version")}
    return text | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}} | top | {"vision_config": vision}


def test_an_older_file_of_qwen_has_the_shape_of_the_meta_device(tmp_path):
    save_tiny_vision("qwen2_5_vl", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_with_old_settings(read_config(tmp_path))))
    assert_equal(tmp_path)


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    "change",
    [
        _without("num_experts_per_tok"),
        _without("num_key_value_heads"),
        lambda values: values | {"quantization_config": {"quant_method": "fp8"}},
        lambda values: values | {"model_type": "bamba"},
    ],
)
def test_transformers_decides_if_the_files_do_not_determine_the_shape(change, tmp_path):
    save(tiny_config("mixtral"), tmp_path)
    assert stored_shape(tmp_path, change(read_config(tmp_path))) is None


def test_transformers_decides_for_damaged_and_missing_weights(tmp_path):
    save(tiny_config("mixtral"), tmp_path)
    config, file = read_config(tmp_path), tmp_path / "model.safetensors"
    shape = find_shape(str(tmp_path))
    # A pointer of Git LFS instead of the file.
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert stored_shape(tmp_path, config) is None
    file.unlink()
    assert stored_shape(tmp_path, config) is None
    assert sizes(find_shape(str(tmp_path))) == sizes(shape)


def test_folders_are_planned_without_torch(tmp_path):
    """Importing torch and transformers takes longer than the plan may take."""
    actor, reward = (
        save_tiny_vision("qwen3_5_moe", tmp_path / "actor"),
        save(tiny_config("lfm2_moe"), tmp_path / "reward"),
    )
    words = ["plan", "ppo", "--pretrain", str(actor), "--reward_pretrain", str(reward), "--gpu", "h100"]
    code = f"import sys\nfrom rlhf_cli import cli\nassert cli.main({words}) == 0\n"
    code += "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
