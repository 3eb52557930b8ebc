"""Decodes images to RGB pixels, upright, with transparency on white.

Videos, animations and formats that require other programs are rejected.
"""

import io
import math
import warnings

import numpy as np
from PIL import Image, ImageOps

warnings.filterwarnings(
    "ignore", category=Image.DecompressionBombWarning
)  # at import: filters are global to all threads

# Only these decoders: others run external programs on untrusted files.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Supported formats. Pillow decodes others with external programs (EPS), or they have no fixed size (WMF)."""
_DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes with more than 8 bits per channel, which Pillow clips to white when converting to RGB."""
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_ORIENTATION = 0x0112
"""EXIF tag; values from `_SIDEWAYS` swap height and width."""
_SIDEWAYS = 5
_DRAFT = 8
"""JPEGs are decoded at an eighth of their size to verify that they are complete, which is much faster."""


class PictureFault(ValueError):
    """Reason why an image is unreadable."""


def size_of(contents: bytes | memoryview) -> tuple[int, int]:
    """Return height and width of the upright image. Raises PictureFault if it is damaged or unsupported."""
    if not contents:
        raise PictureFault("is empty")
    try:
        image = Image.open(io.BytesIO(contents), formats=FORMATS)
        width, height = image.size
        _refuse_kind(image)
        # EXIF orientation swaps the sides, and models expect upright images.
        if image.getexif().get(_ORIENTATION, 1) >= _SIDEWAYS:
            height, width = width, height
        image.draft("RGB", (image.size[0] // _DRAFT, image.size[1] // _DRAFT))
        # Decode fully, because a truncated file has a valid header.
        image.load()
    except PictureFault:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large() from error
    except Image.UnidentifiedImageError as error:
        raise PictureFault(f"is no picture in a format that is read ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's decoders raise many exception types on damaged files
        raise PictureFault(f"is broken: {str(error) or type(error).__name__}") from error
    return height, width


def _too_large() -> PictureFault:
    return PictureFault(f"has more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels, which may be an attack on the memory")


def _refuse_kind(image: Image.Image) -> None:
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):  # up to twice this size, Pillow only warns
        raise _too_large()
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # MPO: camera JPEG with embedded previews
        raise PictureFault(f"has {frames} frames, and a picture has one")
    if image.mode in _DEEP_MODES:
        raise PictureFault(f"has more than 8 bits a channel (mode {image.mode}): save it with 8")


def pixels_of(contents: bytes | memoryview, height: int, width: int) -> np.ndarray:
    """Return the image's pixels at this size, uint8 [height, width, 3]."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(contents), formats=FORMATS))
    return _in_size(_on_white(image), height, width)


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize pixels, uint8 [.., .., 3], exactly like `pixels_of` for a lossless image."""
    return _in_size(Image.fromarray(pixels), height, width)


def _in_size(image: Image.Image, height: int, width: int) -> np.ndarray:
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.array(image)


def _on_white(image: Image.Image) -> Image.Image:
    """Convert the image to RGB, with white for transparent parts."""
    if image.mode not in _WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    # Convert first: palettes with transparency have no alpha channel.
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
