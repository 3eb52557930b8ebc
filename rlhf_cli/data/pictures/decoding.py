"""Encoded pictures as pixels: RGB, upright, transparency on white.

Videos, animations and formats that need other programs are refused.
"""

import io
import math
import warnings

import numpy as np
from PIL import Image, ImageOps

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # once: filters are shared by threads

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read. Others of Pillow call other programs (EPS) or are drawings without a size (WMF)."""
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of more than 8 bits a channel, which Pillow clips to white when it makes RGB of them."""
WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
ORIENTATION = 0x0112
"""EXIF tag; from `SIDEWAYS` on it exchanges height and width."""
SIDEWAYS = 5
DRAFT = 8
"""A JPEG is decoded at an eighth of its size to find out whether it is whole: much faster."""


class PictureFault(ValueError):
    """Why a picture cannot be read."""


def size_of(contents: bytes | memoryview) -> tuple[int, int]:
    """Return height and width of an upright picture. Raise PictureFault if it is broken or of a kind not read."""
    if not contents:
        raise PictureFault("is empty")
    try:
        image = Image.open(io.BytesIO(contents), formats=FORMATS)
        width, height = image.size
        _refuse_kind(image)
        if image.getexif().get(ORIENTATION, 1) >= SIDEWAYS:
            height, width = width, height
        image.draft("RGB", (image.size[0] // DRAFT, image.size[1] // DRAFT))
        image.load()
    except PictureFault:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large() from error
    except Image.UnidentifiedImageError as error:
        raise PictureFault(f"is no picture in a format that is read ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise errors of many kinds on broken files
        raise PictureFault(f"is broken: {str(error) or type(error).__name__}") from error
    return height, width


def _too_large() -> PictureFault:
    return PictureFault(f"has more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels, which may be an attack on the memory")


def _refuse_kind(image: Image.Image) -> None:
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):  # Pillow only warns, up to twice as many
        raise _too_large()
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a camera's JPEG with previews behind the picture
        raise PictureFault(f"has {frames} frames, and a picture has one")
    if image.mode in DEEP_MODES:
        raise PictureFault(f"has more than 8 bits a channel (mode {image.mode}): save it with 8")


def pixels_of(contents: bytes | memoryview, height: int, width: int) -> np.ndarray:
    """Return the pixels of a picture in this size, uint8 [height, width, 3]."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(contents), formats=FORMATS))
    return _in_size(_on_white(image), height, width)


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return pixels of uint8 [.., .., 3] in this size, as `pixels_of` gives them for a picture without losses."""
    return _in_size(Image.fromarray(pixels), height, width)


def _in_size(image: Image.Image, height: int, width: int) -> np.ndarray:
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.array(image)


def _on_white(image: Image.Image) -> Image.Image:
    """Return the picture as RGB, with white where it is transparent."""
    if image.mode not in WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
