"""Images in plans: tokens, patches, and work of vision encoders, compared with manual calculations."""

import json
from typing import Any

import pytest
import torch
from plans import SMALL, plan_of
from tiny_vision import save_tiny_vision
from transformers import (
    CLIPVisionModel,
    Idefics3Config,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SiglipVisionModel,
    SmolVLMConfig,
)
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

from rlhf_cli import cli
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.images import RowImages
from rlhf_cli.planning.memory import added, total
from rlhf_cli.planning.shapes import shape_of
from rlhf_cli.planning.shared_memory import shared_memory

PIXELS = 9 * 28 * 28
"""Three by three features of four patches with 14 pixels."""
TOWER = 3 * 2 * 14 * 14 * 64 + 2 * (4 * 64 * 64 + 4 * 64 + 3 * 64 * 128 + 2 * 128 + 64 + 2 * 64)
"""Parameters of two layers of 64, with MLPs of 128, biases and two norms, and of the patch embedding."""
OPERATIONS = 2 * TOWER + 4 * 2 * 64 * 36
"""Operations on a patch, which attends to 36 in each of two layers."""
KEPT = 2 * (15 * 64 + 4 * 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny Qwen2.5-VL, whose language model has two layers of 64 with one key head of 32."""
    return str(save_tiny_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen")))


def planned(command: str, folder: str, **values: Any) -> Any:
    return plan_of(
        command, **({"pretrain": folder, "max_pixels": PIXELS, "max_len": 512, "images_per_row": 2} | values)
    )


def test_rows_have_their_images_and_half_of_the_rest(folder):
    work = planned("sft", folder).work
    assert (work.images.tokens, work.images.patches) == (9, 36)
    assert work.tokens.length == (512 + 18) / 2
    assert planned("sft", folder, row_tokens=100).work.tokens.length == 100
    assert planned("sft", folder, row_tokens=10).work.tokens.length == 18
    assert planned("sft", folder, images_per_row=None).work.tokens.length == 256
    # Without a setting, the model's own limit counts, of 16 features.
    assert planned("sft", folder, max_pixels=None).work.images.tokens == 16


def test_the_vision_encoder_works_on_all_patches_of_a_row(folder):
    with_images = planned("sft", folder, row_tokens=72).work.roles["model"].shape
    plain = planned("sft", folder, row_tokens=72, images_per_row=None).work.roles["model"].shape
    assert plain.vision is not None
    assert (plain.vision.parameters, plain.vision.kept_values) == (TOWER, KEPT)
    # 72 patches in a row of 72 tokens.
    assert with_images.active == plain.active + OPERATIONS // 2
    assert with_images.kept_values == plain.kept_values + KEPT
    assert with_images.recomputed_values == plain.recomputed_values + 2 * 64 + KEPT // 2
    assert with_images.parameters == plain.parameters


def test_a_pack_keeps_at_most_four_patches_per_token(folder):
    plain = planned("sft", folder, images_per_row=None).work.roles["model"].shape
    shape = RowImages(1, 7, 64).added_to(plain, 8, trains=True)
    assert shape.kept_values == plain.kept_values + 4 * KEPT
    assert shape.active == plain.active + 8 * (2 * TOWER + 4 * 2 * 64 * 64) // 2


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ({"freeze_vision_tower": "true"}, False),
        ({"lora_rank": 4}, False),
        ({"lora_rank": 4, "lora_vision_tower": "true"}, True),
    ],
)
def test_a_frozen_vision_encoder_keeps_nothing(folder, given, is_kept):
    shapes = [planned("sft", folder, images_per_row=count, **given).work.roles["model"].shape for count in (2, None)]
    assert (shapes[0].kept_values > shapes[1].kept_values) is is_kept
    assert shapes[0].active > shapes[1].active


def test_images_lengthen_prompts_and_their_prefill(folder):
    given = {"prompt_tokens": 100, "response_tokens": 28, "max_new_tokens": 56, "rollout_batch_size": 8}
    with_images, plain = (planned("generate", folder, images_per_row=count, **given) for count in (2, None))
    seconds = 8 * 2 * 36 * OPERATIONS / (0.75 * 989e12)
    assert with_images.seconds == pytest.approx(plain.seconds + seconds, rel=1e-9)
    longer = planned("generate", folder, max_new_tokens=56).work.tokens
    assert longer.prompt == (512 - 56 + 18) / 2


def test_images_of_a_shared_prompt_are_encoded_once(folder):
    given = {"n_samples_per_prompt": 4, "prompt_tokens": 40, "response_tokens": 8, "max_new_tokens": 16}
    shape = planned("grpo", folder, **given).work.roles["actor"].shape
    plain = planned("grpo", folder, **given, images_per_row=None).work.roles["actor"].shape
    # 72 patches in 40 tokens of the prompt and 32 of its responses.
    assert shape.kept_values == plain.kept_values + KEPT
    apart = planned("grpo", folder, **given, share_prompts="false").work.roles["actor"].shape
    assert apart.kept_values == plain.kept_values + round(72 / 48 * KEPT)


def test_the_object_store_holds_four_copies_of_an_image(folder):
    given = {"n_samples_per_prompt": 4, "rollout_batch_size": 8, "prompt_tokens": 40, "max_new_tokens": 56}
    found = [shared_memory(planned("grpo", folder, **given, images_per_row=count).work) for count in (2, None)]
    # Two images for each of eight prompts, with three bytes per pixel: two calls of two iterations.
    assert found[0]["Ray's objects"] - found[1]["Ray's objects"] == 2 * 2 * 8 * 2 * PIXELS * 3


def test_images_need_more_memory_and_time(folder):
    memory = []
    for count in (2, None):
        plan = planned("sft", folder, images_per_row=count, train_max_tokens_per_gpu=8192, row_tokens=100)
        (gpu,) = plan.gpus
        memory.append((total(added(gpu.phases["train"])), plan.times["train"].seconds))
    assert memory[0][0] > memory[1][0]
    assert memory[0][1] > memory[1][1]


@pytest.mark.parametrize(
    ("kind", "tokens", "patches"),
    # Sixteen patches of a square of 56 pixels: a token for each in LLaVA with CLIP; four with three marks in Idefics3.
    [("llava", 16, 16), ("idefics3", 4 + 3, 16)],
)
def test_models_with_a_fixed_size_have_fixed_tokens(kind, tokens, patches, tmp_path):
    images = planned("sft", str(save_tiny_vision(kind, tmp_path)), max_pixels=None, images_per_row=1).work.images
    assert (images.tokens, images.patches) == (tokens, patches)


def test_a_column_with_images_has_one_per_row_and_the_output_shows_it(folder, capsys):
    words = ["plan", "sft", "--pretrain", folder, "--gpu", "h100", "--image_key", "photo", "--max_pixels", str(PIXELS)]
    assert cli.main(words) == 0
    assert "Images per row: 1, each with up to 9 tokens and 36 patches\n" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["images"]
    assert found == {"per_row": 1, "tokens_per_image": 9, "patches_per_image": 36}
    assert cli.main([*words, "--images_per_row", "0", "--json"]) == 0
    assert "images" not in json.loads(capsys.readouterr().out)


def test_images_without_room_or_model_are_refused(folder):
    with pytest.raises(
        UsageError, match="--images_per_row 4: images have up to 9 tokens each, but a row has room for 32"
    ):
        planned("sft", folder, images_per_row=4, max_len=32)
    with pytest.raises(UsageError, match=f"--images_per_row: {SMALL} reads no images"):
        plan_of("sft", pretrain=SMALL, images_per_row=1)


ROTATED: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VisionTransformerPretrainedModel),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VisionTransformerPretrainedModel),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLVisionModel),
    "qwen3_5": (Qwen3_5Config, Qwen3_5VisionModel),
}
SQUARE: dict[str, tuple[Any, Any]] = {
    "clip_vision_model": (LlavaConfig, CLIPVisionModel),
    "siglip_vision_model": (LlavaConfig, SiglipVisionModel),
    "idefics3": (Idefics3Config, Idefics3VisionTransformer),
    "smolvlm": (SmolVLMConfig, SmolVLMVisionTransformer),
}


def saved_values(config: Any, model_class: Any, inputs: dict[str, Any]) -> float:
    """Return the bf16 values that PyTorch saves for the backward pass, each memory once, without parameters."""
    model = model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # The storages stay referenced, so that no address is used twice.
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Held, because otherwise the graph would be freed before it is counted.
        output = model(**inputs)
    assert output is not None
    return sum(storage.nbytes() for storage in saved.values()) / 2


@pytest.mark.parametrize("kind", [*ROTATED, *SQUARE])
def test_values_of_a_vision_layer_are_those_that_pytorch_saves(kind):
    """The difference of four and two layers of 128, with MLPs of 256 and 64 patches."""
    config_class, model_class = (ROTATED | SQUARE)[kind]
    of_type = {"model_type": kind} if kind.endswith("_model") else {}
    found = []
    for layers in (2, 4):
        if kind in ROTATED:
            sizes: dict[str, Any] = {
                "depth": layers,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_heads": 4,
                "patch_size": 14,
            }
            sizes |= {"embed_dim": 128, "mlp_ratio": 2, "fullatt_block_indexes": [0, 1, 2, 3], "out_hidden_size": 128}
            sizes |= {"deepstack_visual_indexes": [0]}
            inputs = {"hidden_states": torch.randn(64, 3 * 2 * 14 * 14, dtype=torch.bfloat16)}
            inputs["grid_thw"] = torch.tensor([[1, 8, 8]])
        else:
            sizes = {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 256, "image_size": 112}
            sizes |= {"num_attention_heads": 4, "patch_size": 14, **of_type}
            inputs = {"pixel_values": torch.randn(1, 3, 112, 112, dtype=torch.bfloat16)}
        text = {"model_type": "llama", "vocab_size": 64, "pad_token_id": 0} if kind in SQUARE else None
        config = config_class(vision_config=sizes, text_config=text, pad_token_id=0)
        found.append((saved_values(config.vision_config, model_class, inputs) / 64, shape_of(config).vision))
    (few, of_two), (many, of_four) = found
    assert of_two is not None
    assert of_four is not None
    planned = of_four.kept_values - of_two.kept_values
    # A class token and statistics of norms are not planned.
    assert (many - few) == pytest.approx(planned, rel=0.03)
