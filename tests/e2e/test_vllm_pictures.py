"""The vLLM rollout engine for real on prompts with pictures. Slow: such an engine takes half a minute to start."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine_under_test import Engine
from pictured_engines import (
    SAMPLING,
    change_tower,
    largest_difference,
    pictured_requests,
    prefer_placeholders,
    sent_weights,
    shm_sender,
    trainer_of,
)
from safetensors.torch import load_file, save_file
from tiny_vision import save_tiny_vision
from vision_sequences import tiny_family

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.errors import RunError, UsageError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
KINDS = ["idefics3"]
if importlib.util.find_spec("torchvision") is not None:  # vLLM's models of Qwen-VL import it
    KINDS += ["qwen2_5_vl", "qwen3_vl", "llava"]


def name_tower_as_on_the_hub(folder: Path) -> None:
    """Rename the tensors of LLaVA's tower, which transformers 5 names otherwise in folders of a new model."""
    file = folder / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_trainers_before_and_after_pushes_and_wrong_counts_change_nothing(tmp_path: Path, kind: str):
    folder, sender = save_tiny_vision(kind, tmp_path, splits=kind == "idefics3"), shm_sender()
    if kind == "llava":
        name_tower_as_on_the_hub(folder)
    trainer, requests = trainer_of(folder), pictured_requests(folder)
    settings = EngineSettings(max_model_len=512, dtype="fp32", num_threads=1, max_images_per_prompt=2)
    engine = Engine(str(folder), settings)
    first = engine.generate(requests, SAMPLING)
    assert largest_difference(trainer, requests, first) < 1e-5
    assert first[0].logprobs[0] != first[-2].logprobs[0]  # the same question with another picture
    pictured = requests[0]
    with pytest.raises(UsageError, match=re.escape("has 3 pictures; the engine was built for 2")):
        engine.generate([replace(pictured, pictures=pictured.pictures * 3)], SAMPLING)
    (placed,) = pictured.pictures
    shorter = replace(
        pictured,
        prompt_ids=pictured.prompt_ids[: placed.stop - 1] + pictured.prompt_ids[placed.stop :],
        pictures=(replace(placed, length=placed.length - 1),),
    )
    with pytest.raises(RunError, match=f"vLLM makes {len(pictured.prompt_ids)} tokens"):
        engine.generate([*requests, shorter], SAMPLING)
    assert engine.generate(requests, SAMPLING) == first
    prefer_placeholders(trainer, folder)
    engine.push(sent_weights(trainer, sender, 1), 1)
    placeholders = engine.generate(requests, SAMPLING)
    assert sum(one.token_ids.count(tiny_family(folder).image_token) for one in placeholders) > 10
    assert largest_difference(trainer, requests, placeholders) < 1e-5
    change_tower(trainer)
    engine.push(sent_weights(trainer, sender, 2), 2)
    later = engine.generate(requests, SAMPLING)
    assert largest_difference(trainer, requests, later) < 1e-5
    assert largest_difference(trainer, requests, placeholders) > 1e-3
    sender.close()
    engine.shutdown()
