"""Prompts in the form in which vLLM's engine takes them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import Picture, unexpanded

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer


async def engine_prompt(renderer: "BaseRenderer", request: GenerationRequest) -> Any:
    """Return the prompt of a request for vLLM.

    Raises:
        RunError: vLLM makes other tokens of the pictures than the prompt has. The engine has not seen it yet.
    """
    if not request.pictures:
        return {"type": "token", "prompt_token_ids": request.prompt_ids}
    pictures = [placed.picture for placed in request.pictures]
    prompt = {
        "prompt_token_ids": unexpanded(request.prompt_ids, request.pictures),
        "multi_modal_data": {"image": [_image(picture) for picture in pictures]},
        # The digest is of the contents, so vLLM need not hash the pixels of each sample again.
        "multi_modal_uuids": {"image": [picture.digest for picture in pictures]},
    }
    (rendered,) = await renderer.render_cmpl_async([prompt])
    check_expansion(rendered["prompt_token_ids"], request)
    return rendered


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
