"""Conversion of prompts to vLLM's format. Each distinct prompt with images is rendered once per batch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import Picture, unexpanded

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

_Rendered = Mapping[object, Any]
"""Rendered prompts with images, by `GenerationRequest.prompt`."""


async def rendered_prompts(renderer: "BaseRenderer", requests: Sequence[GenerationRequest]) -> _Rendered:
    """Render each distinct prompt with images.

    Raises:
        RunError: vLLM expands image placeholders to other tokens than the trainer. Nothing has been sent to the engine.
    """
    distinct = {request.prompt: request for request in requests if request.pictures}
    if not distinct:
        return {}
    # Skip the cache that mirrors the engine's cache: it must be filled in the order in which requests are added.
    made = await renderer.render_cmpl_async([_unrendered(one) for one in distinct.values()], skip_mm_cache=True)
    for prompt, request in zip(made, distinct.values(), strict=True):
        _check_expansion(prompt["prompt_token_ids"], request)
    return dict(zip(distinct, made, strict=True))


def _unrendered(request: GenerationRequest) -> Any:
    pictures = [placed.picture for placed in request.pictures]
    return {
        "prompt_token_ids": unexpanded(request.prompt_ids, request.pictures),
        "multi_modal_data": {"image": [_image(picture) for picture in pictures]},
        # The digest is a content hash, so vLLM does not need to hash the pixels again.
        "multi_modal_uuids": {"image": [picture.digest for picture in pictures]},
    }


def engine_prompt(processor: "InputProcessor", request: GenerationRequest, rendered: _Rendered) -> Any:
    """Build the prompt for the next request to add.

    The engine caches images by digest, so a request contains only images that are not in the cache.
    """
    if not request.pictures:
        return {"type": "token", "prompt_token_ids": request.prompt_ids}
    prompt = rendered[request.prompt]
    inputs = {modality: list(items) for modality, items in prompt["mm_kwargs"].items()}
    cache = processor.renderer.mm_processor_cache
    # Touch first, as the engine does: both caches must evict the same images when full.
    if cache is not None:
        for digest in itertools.chain.from_iterable(prompt["mm_hashes"].values()):
            cache.touch_sender_cache_item(digest)
    # Modifies `inputs`: images in the engine's cache become None.
    processor.inject_into_mm_cache(prompt["mm_hashes"], inputs)
    return {**prompt, "mm_kwargs": inputs}


def _image(picture: Picture) -> object:
    from PIL import Image

    return Image.fromarray(picture.pixels)


def _check_expansion(found: Sequence[int], request: GenerationRequest) -> None:
    """Raise RunError if vLLM's prompt tokens differ from the request's, which the trainer uses."""
    wanted = request.prompt_ids
    if list(found) == wanted:
        return
    pairs = enumerate(zip(found, wanted, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(found), len(wanted)))
    sizes = ", ".join(f"{placed.picture.width} x {placed.picture.height}" for placed in request.pictures)
    raise RunError(
        f"a prompt with images ({sizes} pixels) has {len(found)} tokens in vLLM and {len(wanted)} in the trainer; they "
        f"differ from token {place} on, because vLLM's processor resizes images or counts image tokens differently"
    )
