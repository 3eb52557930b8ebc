"""Image reader for a command's model."""

from pathlib import Path

from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.vision.families.table import FAMILIES, find_family, is_text_only


def picture_reader(
    pictures: PicturesConfig, source: ModelSource, found: FoundModel, tokenizer: object
) -> PictureReader | None:
    """Create the image reader for a model, or return None for a model that reads only text.

    Raises:
        UsageError: `find_family` fails, `image_dir` does not exist, or image settings are set for a model that reads
            only text.
    """
    family = find_family(
        found.path,
        found.architecture,
        tokenizer,
        min_pixels=pictures.min_pixels,
        max_pixels=pictures.max_pixels,
        trust_remote_code=source.trust_remote_code,
    )
    if family is not None:
        _require_folder(pictures.image_dir)
        return PictureReader(family, pictures)
    given = pictures.changed(*PicturesConfig.model_fields)
    # In OpenRLHF, max_images_per_prompt=0 means text only, so commands copied from there work.
    if given is not None and pictures.max_images_per_prompt > 0:
        kind = found.architecture.model_type
        what = f"of type {kind}, which reads only text here" if is_text_only(found.architecture) else "a text model"
        raise UsageError(
            f"{given} requires a vision-language model, but pretrain {source.pretrain!r} is {what}: use a model of "
            f"type {', '.join(FAMILIES)}"
        )
    return None


def _require_folder(image_dir: str | None) -> None:
    if image_dir is not None and not Path(image_dir).expanduser().is_dir():
        raise UsageError(f"image_dir {image_dir!r}: there is no such folder")
