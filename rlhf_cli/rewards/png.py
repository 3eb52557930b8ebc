"""Pictures as PNG files in base64, in which form they leave this process."""

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reward workers import no torch
    from rlhf_cli.models.vision.pictures import Picture


def png_in_base64(picture: "Picture") -> str:
    """Return the picture as a PNG file in base64, as lines of JSON can have it."""
    from PIL import Image  # after the start of the program, as most runs have no pictures

    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
