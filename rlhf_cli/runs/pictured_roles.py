"""Whether the engines and the other models of a run take the pictures that its policy takes."""

from importlib.util import find_spec

from transformers import PretrainedConfig

from rlhf_cli.backends.rollout.torchvision_folder import lacks_torchvision
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.vision.families.processing import PictureProcessing
from rlhf_cli.models.vision.families.table import find_processing, takes_pictures

EXTREMES = ((1, 1), (1000, 1500), (10_000, 10_000))
"""Pictures whose final sizes lie at both ends of what a model takes, and between."""

NEEDS_NUM2WORDS = ("smolvlm",)
"""Types whose processors of transformers, which vLLM calls, import num2words for the lengths of videos."""


def check_engine_pictures(architecture: PretrainedConfig, *, backend: str, pushes_adapter: bool = False) -> None:
    """Raise UsageError if engines of this kind cannot have the model with its vision tower."""
    if not takes_pictures(architecture):
        return
    kind = architecture.model_type
    if pushes_adapter:
        raise UsageError(f"--lora_push adapter: vLLM gets models of type {kind} whole; --lora_push merged pushes them")
    if backend == "vllm" and lacks_torchvision(kind):
        raise UsageError(
            f"vLLM's models of type {kind} need torchvision, which is not installed (docs/howto/debugging.md): "
            "`make setup` installs it; --rollout_backend transformers does without"
        )
    if backend == "vllm" and kind in NEEDS_NUM2WORDS and find_spec("num2words") is None:
        raise UsageError(
            f"vLLM's models of type {kind} need num2words, which is not installed: `pip install num2words`, or "
            "--rollout_backend transformers"
        )


def check_role_pictures(
    policy: FoundModel, role: FoundModel, what: str, *, pictures: PicturesConfig, trust_remote_code: bool
) -> None:
    """Raise UsageError if a model that reads the policy's sequences takes their pictures in another way, or not at all.

    Args:
        what: the setting that names the model of the role.
    """
    if not takes_pictures(policy.architecture):
        return
    kind = policy.architecture.model_type
    if role.architecture.model_type != kind:
        raise UsageError(
            f"{what} is of type {role.architecture.model_type}, which does not read the pictures of a {kind} model"
        )
    own = find_processing(
        policy.path,
        policy.architecture,
        min_pixels=pictures.min_pixels,
        max_pixels=pictures.max_pixels,
        trust_remote_code=trust_remote_code,
    )
    other = find_processing(role.path, role.architecture, trust_remote_code=trust_remote_code)
    if any(_taken(own, *size) != _taken(other, *size) for size in (own.final_size(*given) for given in EXTREMES)):
        raise UsageError(
            f"{what} cuts pictures in another way than the policy, by its image processor or the patches of its tower"
        )


def _taken(processing: PictureProcessing, height: int, width: int) -> tuple[object, ...]:
    """Return how a model takes a picture of this size: the size after its own resizing, and the tokens."""
    size = processing.final_size(height, width)
    return size, processing.grid(height, width), processing.marks(height, width, "*")
