"""Prompts in the form in which vLLM's engine takes them: each distinct one with pictures is made once a batch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import Picture, unexpanded

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

Rendered = Mapping[object, Any]
"""vLLM's form of the prompts with pictures, by `GenerationRequest.prompt`."""


async def rendered_prompts(renderer: "BaseRenderer", requests: Sequence[GenerationRequest]) -> Rendered:
    """Return vLLM's form of each distinct prompt with pictures.

    Raises:
        RunError: vLLM makes other tokens of the pictures than the prompt has. The engine has not seen it yet.
    """
    distinct = {request.prompt: request for request in requests if request.pictures}
    if not distinct:
        return {}
    # Without the cache that mirrors the engine's: it is filled when requests are added, in their order.
    made = await renderer.render_cmpl_async([_unrendered(one) for one in distinct.values()], skip_mm_cache=True)
    for prompt, request in zip(made, distinct.values(), strict=True):
        check_expansion(prompt["prompt_token_ids"], request)
    return dict(zip(distinct, made, strict=True))


def _unrendered(request: GenerationRequest) -> Any:
    pictures = [placed.picture for placed in request.pictures]
    return {
        "prompt_token_ids": unexpanded(request.prompt_ids, request.pictures),
        "multi_modal_data": {"image": [_image(picture) for picture in pictures]},
        # The digest is of the contents, so vLLM need not hash the pixels again.
        "multi_modal_uuids": {"image": [picture.digest for picture in pictures]},
    }


def engine_prompt(processor: "InputProcessor", request: GenerationRequest, rendered: Rendered) -> Any:
    """Return the prompt of a request that is added next.

    The engine keeps pictures under their digests. A request sends those that it has not, or not any more.
    """
    if not request.pictures:
        return {"type": "token", "prompt_token_ids": request.prompt_ids}
    prompt = rendered[request.prompt]
    inputs = {modality: list(items) for modality, items in prompt["mm_kwargs"].items()}
    cache = processor.renderer.mm_processor_cache
    if cache is not None:  # the engine does so first, and both sides have to drop the same pictures of a full cache
        for digest in itertools.chain.from_iterable(prompt["mm_hashes"].values()):
            cache.touch_sender_cache_item(digest)
    processor.inject_into_mm_cache(prompt["mm_hashes"], inputs)  # in place: what the engine has becomes None
    return {**prompt, "mm_kwargs": inputs}


def _image(picture: Picture) -> object:
    from PIL import Image

    return Image.fromarray(picture.pixels)


def check_expansion(found: Sequence[int], request: GenerationRequest) -> None:
    """Raise RunError if the engine's prompt is not the prompt of the request, which is trained on."""
    wanted = request.prompt_ids
    if list(found) == wanted:
        return
    pairs = enumerate(zip(found, wanted, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(found), len(wanted)))
    sizes = ", ".join(f"{placed.picture.width} x {placed.picture.height}" for placed in request.pictures)
    raise RunError(
        f"vLLM makes {len(found)} tokens of a prompt with pictures of {sizes} pixels, the trainer {len(wanted)}; they "
        f"differ from token {place} on: the model's processor cuts or counts pictures in another way"
    )
