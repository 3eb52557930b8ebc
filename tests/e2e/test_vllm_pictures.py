"""Tests of the real vLLM rollout engine on prompts with images.

Qwen-VL and LLaVA models need torchvision, which `make setup` installs with vLLM on a CPU.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from pictured_engines import name_tower_as_on_the_hub
from pictured_vllm import MOST_PIXELS, Findings, findings_of
from tiny_vision import save_tiny_vision

from rlhf_cli.backends.rollout.torchvision_folder import lacks_torchvision

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
REPORTED = Path(sys.prefix) / ".no_torchvision"
"""Written by `make setup` if torchvision for vLLM is not available on the machine."""


def make_model(kind: str, folder: Path) -> Path:
    save_tiny_vision(kind, folder, splits=kind == "idefics3")
    if kind == "llava":
        name_tower_as_on_the_hub(folder)
    return folder


def require_torchvision(kind: str) -> None:
    """Skip models that vLLM cannot load here. On CI, fail unless the setup has reported it."""
    if lacks_torchvision(kind):
        assert REPORTED.exists() or os.environ.get("CI") != "true", "`make setup` has not installed torchvision"
        pytest.skip("vLLM requires torchvision for models of this type, but it is not installed")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    """Return the results for two models, whose engines share a process so that vLLM is imported once."""
    for kind in request.param:
        require_torchvision(kind)
    place = tmp_path_factory.mktemp("models")
    return findings_of([make_model(kind, place / kind) for kind in request.param])


both = pytest.mark.parametrize(
    "found",
    [("qwen2_5_vl", "idefics3"), pytest.param(("qwen3_vl", "llava"), marks=pytest.mark.slow)],
    ids=["qwen2_5_vl and idefics3", "qwen3_vl and llava"],
    indirect=True,
)


@both
def test_logprobs_are_the_trainers_before_and_after_pushes_of_the_tower_and_of_sampled_placeholders(found):
    for kind, one in found.items():
        assert one.difference < 1e-5, kind
        assert one.sees_pictures, kind
        assert one.num_placeholders > 10, kind
        assert one.difference_with_placeholders < 1e-5, kind
        assert one.difference_after_tower < 1e-5, kind
        assert one.change_by_tower > 1e-3, kind


@both
def test_wrong_numbers_of_pictures_and_tokens_are_refused_and_change_nothing(found):
    for kind, one in found.items():
        assert "has 3 images; the engine's limit is 2" in one.too_many, kind
        assert "a prompt with images (" in one.wrong_run, kind
        assert one.is_as_before, kind


@both
def test_each_picture_goes_to_the_engine_once_and_again_if_its_cache_had_no_room(found):
    for kind, one in found.items():
        # For Idefics3, the cache drops the first of two images of a prompt before the second sample.
        assert (one.num_pictures_sent, one.num_sent_again) == ((6, 7) if kind == "idefics3" else (4, 4)), kind
    assert max(one.difference_sent_again for one in found.values()) < 1e-5


@both
def test_memory_is_reserved_for_pictures_of_the_most_pixels_that_the_trainer_makes(found):
    for kind, one in found.items():
        if "qwen" in kind:
            assert one.most_tokens == MOST_PIXELS // (28 * 28)
