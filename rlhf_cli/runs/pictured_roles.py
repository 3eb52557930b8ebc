"""Checks that the rollout engine and the other roles process images like the policy."""

from importlib.util import find_spec

from transformers import PretrainedConfig

from rlhf_cli.backends.rollout.torchvision_folder import lacks_torchvision
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.vision.families.processing import PictureProcessing
from rlhf_cli.models.vision.families.table import FAMILIES, find_processing, is_multimodal, takes_pictures

_EXTREMES = ((1, 1), (1000, 1500), (10_000, 10_000))
"""Image sizes (height, width) below, inside and above the limits of typical models."""


def check_engine_pictures(architecture: PretrainedConfig, *, backend: str, pushes_adapter: bool = False) -> None:
    """Raise UsageError if the rollout backend does not support this vision-language model."""
    if not is_multimodal(architecture):
        return
    kind = architecture.model_type
    if pushes_adapter:
        raise UsageError(f"--lora_push adapter does not support models of type {kind}; use --lora_push merged")
    if backend == "vllm" and lacks_torchvision(kind):
        raise UsageError(
            f"vLLM requires torchvision for models of type {kind}, but it is not installed (docs/howto/debugging.md): "
            "run `make setup`, or use --rollout_backend transformers"
        )
    needs = FAMILIES[kind].vllm_needs if kind in FAMILIES else ()
    if backend == "vllm" and "num2words" in needs and find_spec("num2words") is None:
        raise UsageError(
            f"vLLM requires num2words for models of type {kind}, but it is not installed: run `pip install num2words`, "
            "or use --rollout_backend transformers"
        )


def check_role_pictures(
    policy: FoundModel, role: FoundModel, what: str, *, pictures: PicturesConfig, trust_remote_code: bool
) -> None:
    """Raise UsageError if a role that reads the policy's sequences does not process images like the policy.

    Args:
        policy: the policy's model.
        role: the role's model.
        what: the setting with the role's model, for the message.
        pictures: image settings of the policy.
        trust_remote_code: whether to run model code from the folders.
    """
    if not takes_pictures(policy.architecture):
        return
    kind = policy.architecture.model_type
    if role.architecture.model_type != kind:
        raise UsageError(
            f"{what} has type {role.architecture.model_type}, which cannot process images for a {kind} model"
        )
    own = find_processing(
        policy.path,
        policy.architecture,
        min_pixels=pictures.min_pixels,
        max_pixels=pictures.max_pixels,
        trust_remote_code=trust_remote_code,
    )
    # Use the role's own defaults: it is compared with what the policy produces.
    other = find_processing(role.path, role.architecture, trust_remote_code=trust_remote_code)
    # Compare sizes after the policy's resizing, since the role receives resized images.
    if any(_taken(own, *size) != _taken(other, *size) for size in (own.final_size(*given) for given in _EXTREMES)):
        raise UsageError(f"{what} splits images differently than the policy: the image processor or patch size differs")


def _taken(processing: PictureProcessing, height: int, width: int) -> tuple[object, ...]:
    """Return how a model processes an image of this size: the final size, patch grid and placeholder tokens."""
    size = processing.final_size(height, width)
    return size, processing.grid(height, width), processing.marks(height, width, "*")
