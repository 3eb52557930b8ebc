"""Images in packs: their rows, features, and positions in three dimensions."""

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.placing_pictures import TokenRun, rope_positions
from rlhf_cli.data.packing.shared_prompts import pack_groups, plan_groups
from rlhf_cli.models.packs import with_filler
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels

IMAGE = 7
RED, BLUE = (picture_of_pixels(name, np.full((4, 4, 3), number, np.uint8)) for number, name in enumerate("rb"))


def sequence(*parts, trained):
    """Build a sequence from token ids and images with their grids; the last `trained` tokens are targets."""
    ids, pictures = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            picture, grid = part
            pictures.append(PlacedPicture(picture, len(ids), grid[0] * grid[1], IMAGE, grid))
            ids += [IMAGE] * (grid[0] * grid[1])
    mask = np.arange(len(ids)) >= len(ids) - trained
    return TokenSequence(np.array(ids, np.int32), mask, tuple(pictures))


@pytest.mark.parametrize(
    "given",
    [
        sequence(1, 2, (RED, (2, 3)), 3, 4, trained=1),
        sequence((BLUE, (1, 4)), 1, (RED, (3, 1)), 9, (RED, (2, 2)), 5, 6, trained=2),
        sequence(1, 2, 3, trained=1),
    ],
)
def test_positions_in_three_axes_are_the_models_own(given):
    config = Qwen2_5_VLConfig(image_token_id=IMAGE, video_token_id=8, vision_start_token_id=9)
    with torch.device("meta"):
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        model = Qwen2_5_VLForConditionalGeneration(config).model
    ids = torch.from_numpy(given.token_ids.astype(np.int64))[None]
    # Patches of the vision tower, which merges 2 x 2.
    grids = [(1, 2 * one.grid[0], 2 * one.grid[1]) for one in given.pictures]
    theirs, _ = model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=torch.tensor(grids) if grids else None
    )
    ours = rope_positions(TokenRun(given.token_ids, pictures=given.pictures))
    assert theirs[:, 0].tolist() == ours.tolist()


def pictures_of(given):
    assert given.pictures is not None
    return given.pictures


def test_a_pack_without_pictures_has_none():
    assert pack([sequence(1, 2, trained=1)]).pictures is None
    assert pack([]).pictures is None


def test_a_picture_has_its_features_once_and_its_rows_in_every_sequence():
    text, one = sequence(5, 6, trained=1), sequence(1, (RED, (1, 2)), 4, trained=1)
    other = sequence((BLUE, (2, 1)), (RED, (1, 2)), 4, trained=1)
    made = pack([text, one, other])
    assert pictures_of(made).pictures == (RED, BLUE)
    assert pictures_of(made).rows_P.tolist() == [3, 4, 6, 7, 8, 9]
    assert pictures_of(made).features_P.tolist() == [0, 1, 2, 3, 0, 1]
    assert pictures_of(made).rope_3T[:, :2].tolist() == [[0, 1]] * 3


def test_a_placeholder_that_a_model_samples_is_a_token_like_others():
    given = sequence(1, (RED, (1, 2)), IMAGE, IMAGE, trained=2)
    assert pictures_of(pack([given])).rows_P.tolist() == [1, 2]


def test_tokens_between_placeholders_get_no_feature():
    ids = np.array([1, 5, IMAGE, IMAGE, 5, IMAGE, 2], np.int32)
    placed = PlacedPicture(RED, 1, 5, IMAGE)
    made = pack([TokenSequence(ids, np.arange(7) == 6, (placed,))])
    assert pictures_of(made).rows_P.tolist() == [2, 3, 5]
    assert pictures_of(made).rope_3T is None


def test_a_shared_prompt_has_its_picture_once_and_positions_as_alone():
    prompt = (1, (RED, (2, 3)), 2)
    group = [sequence(*prompt, 3, 4, trained=2), sequence(*prompt, 5, trained=1)]
    shared = pack_groups(group)
    assert shared.input_ids_T.numel() == 8 + 2 + 1
    assert pictures_of(shared).rows_P.tolist() == [1, 2, 3, 4, 5, 6]
    alone = [pictures_of(pack([one])).rope_3T for one in group]
    assert pictures_of(shared).rope_3T.tolist() == torch.cat([alone[0], alone[1][:, 8:]], dim=1).tolist()


def test_prompts_that_differ_in_the_picture_alone_are_not_shared():
    group = [sequence(1, (picture, (1, 2)), 2, 3, trained=1) for picture in (RED, BLUE, RED)]
    (bins,) = plan_groups(group, max_tokens=100, num_ranks=1, quadratic_cost=0.0)
    assert sorted(bins[0]) == [0, 1, 2]
    assert sorted(bins[0].index(place) for place in (0, 2)) in ([0, 1], [1, 2])
    assert pack_groups(group[:2]).keys is None
    assert pictures_of(pack_groups(group)).pictures == (RED, BLUE)


def test_pictures_behind_the_first_trained_token_belong_to_the_continuation():
    ids = np.array([1, 2, 3, IMAGE, IMAGE, 4], np.int32)
    mask = np.array([0, 0, 1, 0, 0, 1], bool)
    group = [TokenSequence(ids, mask, (PlacedPicture(picture, 3, 2, IMAGE, (1, 2)),)) for picture in (RED, BLUE)]
    shared = pack_groups(group)
    assert shared.input_ids_T.numel() == 2 + 4 + 4
    assert pictures_of(shared).rows_P.tolist() == [3, 4, 7, 8]
    assert pictures_of(shared).features_P.tolist() == [0, 1, 2, 3]


def test_filler_has_positions_too():
    made = with_filler(pack([sequence(1, (RED, (1, 2)), 3, trained=1)]), 5)
    assert pictures_of(made).rope_3T.shape == (3, 9)
    assert made.input_ids_T.numel() == 9
