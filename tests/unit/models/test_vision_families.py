import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import PATCH, QWEN_BOUNDS, TINY_FAMILIES, random_picture, save_tiny_vision
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Gemma3Config,
    InternVLConfig,
    LlamaConfig,
    PaliGemmaConfig,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string
from vision_sequences import tower_inputs

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.models.vision.families.qwen_vl import QwenVLProcessing
from rlhf_cli.models.vision.families.table import TokenisedFamily, find_family

SIZES = [(56, 56), (80, 120), (120, 50), (30, 97), (224, 57), (111, 223), (9, 500), (1, 60), (60, 1)]

SPLITTING = ("idefics3", "smolvlm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    made = {kind: save_tiny_vision(kind, root / kind) for kind in TINY_FAMILIES}
    split = {f"{kind} split": save_tiny_vision(kind, root / f"{kind}-split", splits=True) for kind in SPLITTING}
    return made | split


def family_in(folder: Path, **bounds: Any) -> TokenisedFamily:
    family = find_family(
        str(folder), AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), **bounds
    )
    assert isinstance(family, TokenisedFamily)
    return family


@pytest.mark.parametrize("kind", ["idefics3", "idefics3 split", "llava"])
def test_runs_are_what_the_models_processor_writes(folders: dict[str, Path], kind: str) -> None:
    family, processor = family_in(folders[kind]), AutoProcessor.from_pretrained(folders[kind])
    for height, width in SIZES:
        size = family.final_size(height, width)
        picture = Image.fromarray(random_picture(*size))
        text = f"a{family.placeholder}\nb"
        made = processor(text=[text], images=[[picture]], return_tensors="pt", add_special_tokens=False)
        expanded = [*family._tokenizer("a")["input_ids"], *family.run(*size).token_ids]
        assert made["input_ids"][0].tolist() == [*expanded, *family._tokenizer("\nb")["input_ids"]], (height, width)


@pytest.mark.parametrize("kind", ["smolvlm", "smolvlm split"])
def test_runs_of_smolvlm_are_what_its_processor_writes_which_needs_packages_for_videos(
    folders: dict[str, Path], kind: str
) -> None:
    family = family_in(folders[kind])
    processor: Any = AutoImageProcessor.from_pretrained(folders[kind])
    for size in (family.final_size(*size) for size in SIZES):
        found = processor([[random_picture(*size)]], input_data_format="channels_last", return_row_col_info=True)
        (rows,), (columns,) = found["rows"][0], found["cols"][0]
        text = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
        assert list(family.run(*size).token_ids) == family._tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_mark_of_a_picture_is_what_the_chat_template_writes(folders: dict[str, Path]) -> None:
    for kind, tiny in TINY_FAMILIES.items():
        assert family_in(folders[kind]).mark == tiny.marks


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "idefics3", "idefics3 split", "smolvlm split", "llava"])
def test_a_run_has_a_placeholder_for_each_feature_of_the_tower(folders: dict[str, Path], kind: str) -> None:
    family, model = family_in(folders[kind]), AutoModelForImageTextToText.from_pretrained(folders[kind])
    sizes = [family.final_size(*size) for size in SIZES]
    inputs = tower_inputs(family, [random_picture(*size) for size in sizes])
    with torch.no_grad():
        features: Any = model.model.get_image_features(**inputs, return_dict=True).pooler_output
    found = features.flatten(0, -2).shape[0] if isinstance(features, torch.Tensor) else sum(map(len, features))
    runs = [family.run(*size) for size in sizes]
    assert found == sum(run.token_ids.count(family.image_token) for run in runs)
    # Qwen-VL has each patch twice, as in a video.
    patches = inputs["pixel_values"].reshape(-1, 3 * PATCH * PATCH).shape[0]
    assert patches == sum(run.patches for run in runs) * (2 if "qwen" in kind else 1)
    assert all(run.grid is None or run.grid[0] * run.grid[1] == len(run.token_ids) for run in runs)


def test_a_qwen_picture_in_its_final_size_is_resized_no_more_and_lies_within_the_bounds(
    folders: dict[str, Path],
) -> None:
    processor, draw = AutoImageProcessor.from_pretrained(folders["qwen2_5_vl"]), random.Random(0)
    for bounds in ({}, {"max_pixels": 6 * 28 * 28}, {"min_pixels": 3 * 28 * 28, "max_pixels": 10 * 28 * 28}):
        family = family_in(folders["qwen2_5_vl"], **bounds)
        for _ in range(200):
            height, width = draw.randint(2, 400), draw.randint(2, 400)
            size = family.final_size(height, width)
            _, *grid = processor(images=[random_picture(*size)], return_tensors="pt")["image_grid_thw"][0].tolist()
            assert [14 * side for side in grid] == list(size)
            least = bounds.get("min_pixels", QWEN_BOUNDS["shortest_edge"])
            most = bounds.get("max_pixels", QWEN_BOUNDS["longest_edge"])
            assert least <= size[0] * size[1] <= most


def test_processing_leaves_the_pixels_of_a_qwen_picture_in_its_final_size_as_they_are(
    folders: dict[str, Path],
) -> None:
    family = family_in(folders["qwen3_vl"])
    pixels = random_picture(56, 84)
    processor: Any = family.processing._processor
    mean, spread = np.array(processor.image_mean), np.array(processor.image_std)
    patch = tower_inputs(family, [pixels])["pixel_values"][0].view(3, 2, 14, 14)  # colours, two frames, rows, columns
    expected = (pixels[:14, :14] / 255 - mean) / spread
    np.testing.assert_allclose(patch[:, 0].permute(1, 2, 0), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["idefics3", "idefics3 split", "llava"])
def test_the_final_size_is_final(folders: dict[str, Path], kind: str) -> None:
    family, draw = family_in(folders[kind]), random.Random(0)
    for _ in range(500):
        size = family.final_size(draw.randint(5, 900), draw.randint(5, 900))
        assert family.final_size(*size) == size


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "idefics3", "idefics3 split", "smolvlm split", "llava"])
def test_inputs_of_pictures_together_are_the_inputs_of_each_end_to_end(folders: dict[str, Path], kind: str) -> None:
    family, model = family_in(folders[kind]), AutoModelForImageTextToText.from_pretrained(folders[kind])

    def features(pictures: list[np.ndarray]) -> torch.Tensor:
        with torch.no_grad():
            found: Any = model.model.get_image_features(
                **tower_inputs(family, pictures), return_dict=True
            ).pooler_output
        return found.flatten(0, -2) if isinstance(found, torch.Tensor) else torch.cat(list(found))

    pictures = [random_picture(*family.final_size(*size), seed=seed) for seed, size in enumerate([(56, 84), (112, 30)])]
    alone = torch.cat([features([picture]) for picture in pictures])
    torch.testing.assert_close(features(pictures), alone, atol=1e-5, rtol=0)


def test_a_text_model_has_no_family_and_other_vision_models_are_refused() -> None:
    tokenizer: Any = None
    assert find_family("nowhere", Qwen2Config(), tokenizer) is None
    assert find_family("nowhere", LlamaConfig(), tokenizer) is None
    assert find_family("nowhere", Gemma3Config(), tokenizer) is None
    with pytest.raises(UsageError, match=r"type paligemma .*attend both ways"):
        find_family("nowhere", PaliGemmaConfig(), tokenizer)
    with pytest.raises(
        UsageError,
        match=r"type internvl with a language model of type gemma are not supported \(not tested\): use qwen2_vl, .*, "
        r"llava, which read images, or .*gemma3, .*, which read text",
    ):
        find_family("nowhere", InternVLConfig(text_config={"model_type": "gemma"}), tokenizer)


def test_pictures_and_bounds_that_leave_no_size_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="one side is more than 200 times the other"):
        family_in(folders["llava"]).final_size(1, 201)
    bounds = {"shortest_edge": 28 * 28, "longest_edge": 10**7}
    large = QwenVLProcessing(
        Qwen2VLImageProcessorPil(size=bounds),
        AutoConfig.from_pretrained(folders["qwen2_5_vl"]),
        min_pixels=None,
        max_pixels=None,
    )
    with pytest.raises(UsageError, match="an image of 6000 x 30 pixels: one side is more than 200 times"):
        large.final_size(30, 6000)  # aspect ratio 200 before rounding to patches
    with pytest.raises(UsageError, match="--max_pixels: models of type idefics3"):
        family_in(folders["idefics3"], max_pixels=1000)
    with pytest.raises(UsageError, match="no image has between 20000 and 12544 pixels"):
        family_in(folders["qwen3_vl"], min_pixels=20000)
    with pytest.raises(UsageError, match=r"60 x 40 pixels: no sides in multiples of 28 have between 3136 and 3136"):
        family_in(folders["qwen3_vl"], min_pixels=3136, max_pixels=3136).final_size(40, 60)


def test_a_folder_without_an_image_processor_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folders["qwen3_vl"])
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="the image processor cannot be loaded"):
        find_family(str(tmp_path), config, AutoTokenizer.from_pretrained(folders["qwen3_vl"]))


def test_the_template_that_a_folder_keeps_for_its_processor_alone_is_the_tokenizers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llava"], tmp_path / "older")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(ModelConfig(pretrain=str(folder))).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(ModelConfig(pretrain=str(folder))).chat_template == template
