"""Settings of pictures in rows."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup


class PicturesConfig(SettingsGroup):
    """Pictures"""

    image_key: str | None = None
    """Column with the pictures of a row; images or image if not given."""
    image_dir: str | None = None
    """Folder in which paths of pictures begin; the folder of the data file if not given."""
    min_pixels: int | None = Field(None, gt=0)
    """Smaller pictures are enlarged to this height times width; the model's own bound if not given."""
    max_pixels: int | None = Field(None, gt=0)
    """Larger pictures are shrunk to this height times width; the model's own bound if not given."""
    max_images_per_prompt: int = Field(8, ge=0)
    """Pictures that a row has at most."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "PicturesConfig":
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels:,} is more than max_pixels {self.max_pixels:,}")
        return self
