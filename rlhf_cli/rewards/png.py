"""Base64 PNG encoding for images sent to reward workers and servers."""

import base64
import io
from typing import TYPE_CHECKING

# Reward workers must start fast, so nothing here imports torch at run time.
if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture


def png_in_base64(picture: "Picture") -> str:
    """Encode an image as a base64 PNG file, which fits in a JSON string."""
    # Imported lazily: most runs have no images.
    from PIL import Image

    file = io.BytesIO()
    # PNG is lossless at every level; level 1 is the fastest.
    Image.fromarray(picture.pixels).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
