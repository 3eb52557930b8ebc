"""Settings for images in rows."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup


class PicturesConfig(SettingsGroup):
    """Images"""

    image_key: str | None = None
    """Column with the images. Default: images or image."""
    image_dir: str | None = None
    """Base folder for image paths. Default: the folder of the data file."""
    min_pixels: int | None = Field(None, gt=0)
    """Upscale smaller images to this number of pixels (height times width). Default: the model's limit."""
    max_pixels: int | None = Field(None, gt=0)
    """Downscale larger images to this number of pixels (height times width). Default: the model's limit."""
    max_images_per_prompt: int = Field(8, ge=0)
    """Maximum number of images per row."""

    @model_validator(mode="after")
    def _check_pixel_bounds(self) -> "PicturesConfig":
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels:,} is more than max_pixels {self.max_pixels:,}")
        return self
