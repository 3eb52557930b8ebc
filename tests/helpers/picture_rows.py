"""Rows with image files, a model family with one token per 28-pixel square, and data loaded with it."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from template_settings import split_settings
from tiny_vision import TINY_FAMILIES, random_picture, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import DataConfig, PreferenceDataConfig, PromptConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.preference_data import PAIRS, Pair
from rlhf_cli.data.prompts import PromptData, load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.family import PictureRun

SQUARE = 28


@dataclass(frozen=True)
class SquareFamily:
    """Family with one image token per 28-pixel square, at most 16."""

    image_token: int
    placeholder: str
    mark: str

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the next multiples of 28, at most four by four."""
        if max(height, width) > 200 * min(height, width):
            raise UsageError(f"a picture of {width} x {height} pixels: one side is more than 200 times the other")
        rows, columns = (min(-(-side // SQUARE), 4) for side in (height, width))
        return rows * SQUARE, columns * SQUARE

    def run(self, height: int, width: int) -> PictureRun:
        """Return one placeholder per square."""
        grid = (height // SQUARE, width // SQUARE)
        return PictureRun((self.image_token,) * (grid[0] * grid[1]), grid, patches=4 * grid[0] * grid[1])


def square_family(kind: str = "qwen2_5_vl") -> tuple[PreTrainedTokenizerBase, SquareFamily]:
    """Return the tokenizer of a tiny family in `tiny_vision`, and a square family with its placeholder."""
    tokenizer = tiny_tokenizer(TINY_FAMILIES[kind])
    placeholder, mark = TINY_FAMILIES[kind].placeholder, TINY_FAMILIES[kind].marks
    return tokenizer, SquareFamily(tokenizer.convert_tokens_to_ids(placeholder), placeholder, mark)


def encoded(height: int = 28, width: int = 28, *, seed: int = 0, form: str = "PNG") -> bytes:
    """Return a random image file."""
    file = io.BytesIO()
    Image.fromarray(random_picture(height, width, seed=seed)).save(file, form)
    return file.getvalue()


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write rows as JSON lines to `folder`, with a.png (two squares) and b.jpg (one square)."""
    (folder / "a.png").write_bytes(encoded(28, 56))
    (folder / "b.jpg").write_bytes(encoded(28, 28, seed=1, form="JPEG"))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reader_of(family: Any, **settings: Any) -> PictureReader:
    """Return an image reader with these settings."""
    return PictureReader(family, PicturesConfig(**settings))


def sequences_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None, **settings: Any
) -> LoadedData[TokenSequence]:
    """Load a file's sequences like rlhf sft."""
    config = DataConfig(dataset=str(path), **settings)
    return SEQUENCES.load(config, tokenizer, dataset=str(path), split="train", seed=0, reader=reader)


def pairs_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None, **settings: Any
) -> LoadedData[Pair]:
    """Load a file's pairs like rlhf dpo."""
    config = PreferenceDataConfig(dataset=str(path), **settings)
    return PAIRS.load(config, tokenizer, dataset=str(path), split="train", seed=0, reader=reader)


def prompts_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None, **settings: Any
) -> PromptData:
    """Load a file's prompts like rlhf grpo."""
    of_data, template = split_settings(settings)
    config = PromptConfig(prompt_data=str(path), **of_data)
    return load_prompts(config, tokenizer, max_new_tokens=16, seed=0, template=template, reader=reader)


def pixels_of_file(path: Path) -> np.ndarray:
    """Return a file's RGB pixels."""
    return np.array(Image.open(path).convert("RGB"))
