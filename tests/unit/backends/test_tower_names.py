"""Parameter names of a LLaVA vision tower: vLLM expects the older names, which every save keeps."""

from pathlib import Path

import pytest
from pictured_engines import name_tower_as_on_the_hub
from tiny_vision import save_tiny_vision

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_start import check_tower_names
from rlhf_cli.errors import UsageError

SETTINGS = EngineSettings(max_model_len=9, max_images_per_prompt=1)


def test_a_tower_with_names_that_vllm_does_not_load_is_refused_before_vllm_starts(tmp_path: Path):
    folder = save_tiny_vision("llava", tmp_path)
    with pytest.raises(UsageError, match=r"contains vision_tower\..*, but vLLM supports only .* --rollout_backend"):
        check_tower_names(str(folder), SETTINGS)
    name_tower_as_on_the_hub(folder)
    check_tower_names(str(folder), SETTINGS)


def test_names_of_other_models_are_left_to_vllm(tmp_path: Path, tiny_model_dir: str):
    for kind in ("qwen2_5_vl", "idefics3"):
        check_tower_names(str(save_tiny_vision(kind, tmp_path / kind)), SETTINGS)
    check_tower_names(tiny_model_dir, EngineSettings(max_model_len=9))
