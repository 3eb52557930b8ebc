"""Engines and models that do not support the policy's images are rejected by name."""

from importlib.util import find_spec

import pytest
from tiny_vision import PATCH, QWEN_BOUNDS, save_larger_vision, save_tiny_vision
from transformers import (
    Gemma3Config,
    Idefics3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
    SmolVLMConfig,
)

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_host import fitted
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.runs.pictured_roles import check_engine_pictures, check_role_pictures
from rlhf_cli.runs.pictures import picture_reader

TEXT, QWEN, IDEFICS, GEMMA = Qwen2Config(), Qwen2_5_VLConfig(), Idefics3Config(), Gemma3Config()


def checked(policy: FoundModel, role: FoundModel, **pictures: int) -> None:
    settings = PicturesConfig(**pictures)
    check_role_pictures(policy, role, "--teacher_pretrain 'm'", pictures=settings, trust_remote_code=False)


def test_a_judge_that_does_not_read_the_policys_pictures_is_refused():
    checked(FoundModel("text", TEXT), FoundModel("m", QWEN))
    for role in (TEXT, IDEFICS):
        complaint = f"--teacher_pretrain 'm' has type {role.model_type}, which cannot process images for a qwen2_5_vl"
        with pytest.raises(UsageError, match=complaint):
            checked(FoundModel("qwen", QWEN), FoundModel("m", role))


def test_a_judge_of_another_size_is_taken_if_it_cuts_the_policys_pictures_as_the_policy_does(tmp_path):
    policy = save_tiny_vision("qwen2_5_vl", tmp_path / "policy")
    larger = save_larger_vision(policy, tmp_path / "larger")
    small, large = (find_model(ModelSource(pretrain=str(folder))) for folder in (policy, larger))
    checked(small, large)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, size=QWEN_BOUNDS | {"longest_edge": 4 * 28 * 28}
    ).save_pretrained(larger)
    with pytest.raises(UsageError, match="'m' splits images differently than the policy"):
        checked(small, large)
    checked(small, large, max_pixels=4 * 28 * 28)


def test_engines_get_vision_models_whole():
    check_engine_pictures(IDEFICS, backend="vllm")
    check_engine_pictures(TEXT, backend="vllm", pushes_adapter=True)
    for whole in (IDEFICS, GEMMA):
        with pytest.raises(UsageError, match="use --lora_push merged"):
            check_engine_pictures(whole, backend="vllm", pushes_adapter=True)


def test_settings_of_images_for_a_model_that_reads_only_text_are_refused():
    source, found = ModelSource(pretrain="m"), FoundModel("m", GEMMA)
    assert picture_reader(PicturesConfig(), source, found, None) is None
    with pytest.raises(
        UsageError, match=r"min_pixels requires .* 'm' is of type gemma3, which reads only text here: use"
    ):
        picture_reader(PicturesConfig(min_pixels=9), source, found, None)
    with pytest.raises(UsageError, match=r"min_pixels requires .* 'm' is a text model: use a model of type qwen2_vl"):
        picture_reader(PicturesConfig(min_pixels=9), source, FoundModel("m", TEXT), None)


@pytest.mark.skipif(find_spec("num2words") is not None, reason="num2words is installed")
def test_vllms_smolvlm_is_refused_without_the_packages_that_its_processor_needs():
    with pytest.raises(
        UsageError, match=r"requires (torchvision|num2words) for models of type smolvlm, but it is not inst"
    ):
        check_engine_pictures(SmolVLMConfig(), backend="vllm")
    check_engine_pictures(SmolVLMConfig(), backend="transformers")


@pytest.mark.parametrize(
    ("architecture", "given", "most"),
    [(TEXT, 3, None), (TEXT, None, None), (IDEFICS, 3, 3), (IDEFICS, None, 1), (IDEFICS, 0, 1), (GEMMA, 3, 0)],
)
def test_an_engine_takes_pictures_if_its_model_does(tmp_path, architecture, given, most):
    architecture.save_pretrained(tmp_path)
    settings = EngineSettings(max_model_len=9, max_images_per_prompt=given)
    assert fitted(settings, str(tmp_path)).max_images_per_prompt == most


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ((None, None), (None, None)),
        ((None, 5 * 28 * 28), (28 * 28, 5 * 28 * 28)),
        ((2 * 28 * 28, None), (2 * 28 * 28, 16 * 28 * 28)),
        ((1, 10**6), (28 * 28, 16 * 28 * 28)),
    ],
)
def test_an_engine_has_the_trainers_bounds_of_pixels_which_are_within_the_processors(tmp_path, given, bounds):
    least, most = given
    settings = EngineSettings(max_model_len=9, min_pixels=least, max_pixels=most)
    found = fitted(settings, str(save_tiny_vision("qwen2_5_vl", tmp_path)))
    assert (found.min_pixels, found.max_pixels) == bounds
