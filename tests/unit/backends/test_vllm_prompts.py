"""Prompts for vLLM: unchanged text, one placeholder per image, and validation before the engine."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_cli.backends.rollout.engine import EngineSettings, check_pictures
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments
from rlhf_cli.backends.rollout.vllm_prompts import engine_prompt, rendered_prompts
from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels

IMAGE = 9
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
PICTURE = picture_of_pixels("digest", PIXELS)
TWO = GenerationRequest(
    [1, 8, IMAGE, IMAGE, 8, 2, IMAGE, IMAGE, IMAGE, 3],
    seed=0,
    pictures=(PlacedPicture(PICTURE, 1, 4, IMAGE), PlacedPicture(picture_of_pixels("other", PIXELS), 6, 3, IMAGE)),
)


class Renderer:
    """Expands each placeholder into several tokens, like vLLM with the model's processor."""

    def __init__(self, *runs):
        self.runs = list(runs)
        self.asked = []

    async def render_cmpl_async(self, prompts, *, skip_mm_cache):
        assert skip_mm_cache, "the cache that mirrors the engine's would be filled before the engine's is emptied"
        self.asked += prompts
        return [self._rendered(prompt) for prompt in prompts]

    def _rendered(self, prompt):
        runs, digests = iter(self.runs), prompt["multi_modal_uuids"]
        ids = [[token] if token != IMAGE else next(runs) for token in prompt["prompt_token_ids"]]
        inputs = {"image": [f"inputs of {digest}" for digest in digests["image"]]}
        ids = [token for run in ids for token in run]
        return {"type": "multimodal", "prompt_token_ids": ids, "mm_kwargs": inputs, "mm_hashes": digests}


class Sent:
    """Images that the engine has cached; they are removed from a prompt in place, as in vLLM."""

    def __init__(self):
        self.digests: set[str] = set()
        self.touched: list[str] = []
        cache = SimpleNamespace(touch_sender_cache_item=self.touched.append)
        self.renderer = SimpleNamespace(mm_processor_cache=cache)

    def inject_into_mm_cache(self, mm_hashes, mm_kwargs):
        for modality, digests in mm_hashes.items():
            assert self.touched[-len(digests) :] == digests, "the engine touches all pictures of a prompt first"
            for place, digest in enumerate(digests):
                if digest in self.digests:
                    mm_kwargs[modality][place] = None
                self.digests.add(digest)


def prompts_for(renderer, requests):
    rendered, sent = asyncio.run(rendered_prompts(renderer, requests)), Sent()
    return [engine_prompt(sent, request, rendered) for request in requests]


def test_text_goes_to_the_engine_as_it_is_and_no_processor_sees_it():
    renderer = Renderer()
    (found,) = prompts_for(renderer, [GenerationRequest([1, 2, IMAGE], seed=0)])
    assert found == {"type": "token", "prompt_token_ids": [1, 2, IMAGE]}
    assert not renderer.asked


def test_pictures_go_with_one_placeholder_each_and_are_known_by_their_digests():
    renderer = Renderer([8, IMAGE, IMAGE, 8], [IMAGE] * 3)
    (found,) = prompts_for(renderer, [TWO])
    assert found["prompt_token_ids"] == TWO.prompt_ids
    (asked,) = renderer.asked
    assert asked["prompt_token_ids"] == [1, IMAGE, 2, IMAGE, 3]
    assert asked["multi_modal_uuids"] == {"image": ["digest", "other"]}
    first, _ = asked["multi_modal_data"]["image"]
    assert (np.asarray(first) == PIXELS).all()


def test_a_prompt_is_made_once_for_all_samples_and_a_picture_goes_to_the_engine_once():
    renderer = Renderer([8, IMAGE, IMAGE, 8], [IMAGE] * 3)
    one = replace(TWO, prompt_ids=[1, 8, IMAGE, IMAGE, 8], pictures=TWO.pictures[:1])
    text = GenerationRequest([1], seed=0)
    requests = [one, text, replace(one, seed=1), replace(TWO, seed=2), replace(TWO, seed=3), replace(one, seed=4)]
    found = prompts_for(renderer, requests)
    assert [len(prompt["multi_modal_uuids"]["image"]) for prompt in renderer.asked] == [1, 2]
    assert [prompt["prompt_token_ids"] for prompt in found] == [request.prompt_ids for request in requests]
    first, other = "inputs of digest", "inputs of other"
    sent = [prompt.get("mm_kwargs", {}).get("image") for prompt in found]
    assert sent == [[first], None, [None], [None, other], [None, None], [None]]


def test_equal_questions_about_other_pictures_are_other_prompts():
    renderer = Renderer([8, IMAGE, IMAGE, 8])
    one = replace(TWO, prompt_ids=[1, 8, IMAGE, IMAGE, 8], pictures=TWO.pictures[:1])
    other = replace(one, pictures=(replace(one.pictures[0], picture=TWO.pictures[1].picture),))
    assert [prompt["mm_hashes"]["image"] for prompt in prompts_for(renderer, [one, other])] == [["digest"], ["other"]]


def test_a_prompt_that_vllm_expands_in_another_way_is_refused_with_the_difference():
    renderer = Renderer([8, IMAGE, 8], [IMAGE] * 3)
    complaint = (
        "a prompt with images (6 x 4, 6 x 4 pixels) has 9 tokens in vLLM and 10 in the trainer; they differ from"
    )
    with pytest.raises(RunError, match=re.escape(f"{complaint} token 3 on")):
        prompts_for(renderer, [TWO])


@pytest.mark.parametrize(
    ("request_", "most", "complaint"),
    [
        (TWO, 1, "prompt 1 has 2 images; the engine's limit is 1 (--max_images_per_prompt)"),
        (TWO, None, "prompt 1 has 2 images; the rollout engine's model supports only text"),
        (replace(TWO, prompt_ids=[*TWO.prompt_ids, IMAGE]), 2, "prompt 1 has 2 images and 3 image placeholders"),
    ],
)
def test_wrong_numbers_of_pictures_are_refused_before_the_engine_is_asked(request_, most, complaint):
    text = GenerationRequest([1, IMAGE], seed=0)
    check_pictures([text, TWO], max_images=2)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        check_pictures([text, request_], max_images=most)


def test_a_text_model_s_engine_starts_as_before_and_a_vision_model_s_with_its_processor():
    text = engine_arguments("m", EngineSettings(max_model_len=9), on_cpu=True)
    assert text["skip_tokenizer_init"]
    assert "limit_mm_per_prompt" not in text
    vision = engine_arguments("m", EngineSettings(max_model_len=9, max_images_per_prompt=3), on_cpu=True)
    assert not vision["skip_tokenizer_init"]
    assert vision["limit_mm_per_prompt"] == {"image": 3, "video": 0}
    assert "mm_processor_kwargs" not in vision
    bounded = EngineSettings(max_model_len=9, max_images_per_prompt=3, min_pixels=5, max_pixels=7)
    found = engine_arguments("m", bounded, on_cpu=True)["mm_processor_kwargs"]
    assert found == {"images_kwargs": {"size": {"shortest_edge": 5, "longest_edge": 7}}}
