"""Images in the rows of a plan: tokens of sequences, and patches of vision encoders."""

from dataclasses import dataclass
from functools import cache

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.architectures import base_of, find_architecture, model_place
from rlhf_cli.planning.shapes import ModelShape

_LARGE = 8192
"""Side of a square image that all models shrink to their limit of pixels."""


@dataclass(frozen=True)
class RowImages:
    """Images of a row: their number, and tokens, patches and pixels of each in the largest size.

    Example: with `--max_pixels 1003520`, Qwen2.5-VL reads a square image as 35 * 35 tokens of four patches each.
    """

    count: int = 0
    tokens: int = 0
    patches: int = 0
    pixels: int = 0

    @property
    def all_tokens(self) -> int:
        """Tokens of all images in a row."""
        return self.count * self.tokens

    def mean_length(self, given: int | None, room: int) -> float:
        """Return the mean tokens of a text with these images: as given, or images and half of what they leave.

        Raises UsageError if they have no room.
        """
        if self.count and self.all_tokens >= room:
            raise UsageError(
                f"--images_per_row {self.count}: images have up to {self.tokens:,} tokens each, but a row has room for "
                f"{room:,}: lower --max_pixels or raise --max_len"
            )
        return max(given or (room + self.all_tokens) / 2, self.all_tokens)

    def added_to(self, shape: ModelShape, row_tokens: float, *, trains: bool = False) -> ModelShape:
        """Return a shape whose sizes per token include the vision encoder's.

        Args:
            shape: model that reads the images.
            row_tokens: tokens per row.
            trains: whether activations of the vision encoder wait for a backward pass.
        """
        if not self.count or shape.vision is None:
            return shape
        # Imports torch, as the shape of a model with images did.
        from rlhf_cli.data.packing.packs import PATCHES_PER_TOKEN

        patches = self.count * self.patches / row_tokens
        # Packs have room for no more patches, but then there are more packs.
        kept = min(patches, PATCHES_PER_TOKEN) if trains else 0
        return shape.with_patches(patches, per_image=self.patches, kept=kept)


def row_images(config: CommandConfig, plan: PlanConfig) -> RowImages:
    """Return the images per row of a command. Raises UsageError if its model reads no images."""
    if not plan.images_per_row:
        return RowImages()
    pretrain = str(config.setting("pretrain") or config.setting("reward_pretrain"))
    bounds = config.setting("min_pixels"), config.setting("max_pixels")
    sizes = _largest_image(pretrain, *bounds, trust_remote_code=bool(config.setting("trust_remote_code")))
    return RowImages(plan.images_per_row, *sizes)


@cache
def _largest_image(
    pretrain: str, min_pixels: int | None, max_pixels: int | None, *, trust_remote_code: bool
) -> tuple[int, int, int]:
    """Return tokens, patches and pixels of the largest square image, as data preparation counts them."""
    # Imports torch and transformers, which takes seconds; a model with images needs them for its shape too.
    from rlhf_cli.models.tokenizers import load_tokenizer
    from rlhf_cli.models.vision.families.table import find_family, takes_pictures

    base = base_of(pretrain)
    architecture = find_architecture(base, trust_remote_code=trust_remote_code)
    if not takes_pictures(architecture):
        raise UsageError(f"--images_per_row: {pretrain} reads no images: set 0, or use a vision-language model")
    path = str(model_place(base) or base)
    tokenizer = load_tokenizer(ModelSource(pretrain=path, trust_remote_code=trust_remote_code))
    family = find_family(
        path,
        architecture,
        tokenizer,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        trust_remote_code=trust_remote_code,
    )
    assert family is not None
    height, width = family.final_size(_LARGE, _LARGE)
    run = family.run(height, width)
    return len(run.token_ids), run.patches, height * width
