"""Architecture of a small model trained from scratch."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup


class ArchitectureConfig(SettingsGroup):
    """Architecture (Qwen2, or the decoder of Idefics3)"""

    hidden_size: int = Field(256, gt=0)
    """Hidden size."""
    intermediate_size: int = Field(1024, gt=0)
    """MLP width."""
    num_hidden_layers: int = Field(8, gt=0)
    """Number of layers."""
    num_attention_heads: int = Field(8, gt=0)
    """Number of query heads."""
    num_key_value_heads: int = Field(2, gt=0)
    """Number of key and value heads."""
    max_position_embeddings: int = Field(2048, gt=0)
    """Maximum sequence length in tokens."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights. Narrow models learn faster with about 1 / sqrt(hidden_size)."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output matrix."""

    @model_validator(mode="after")
    def _check_heads(self) -> "ArchitectureConfig":
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self


class VisionTowerConfig(SettingsGroup):
    """Vision tower (Idefics3)"""

    needs = Needs("image_size")

    image_size: int = Field(0, ge=0)
    """Maximum image side in pixels. Creates an Idefics3 with Llama decoder; 0 creates a text model."""
    patch_size: int = Field(14, gt=0)
    """Patch size in pixels."""
    scale_factor: int = Field(2, gt=0)
    """Adjacent patches per direction merged into one token."""
    vision_hidden_size: int = Field(96, gt=0)
    """Hidden size of the vision encoder. Its MLPs are twice as wide."""
    vision_num_hidden_layers: int = Field(2, gt=0)
    """Number of vision encoder layers."""
    vision_num_attention_heads: int = Field(3, gt=0)
    """Number of vision encoder heads."""

    @property
    def num_image_tokens(self) -> int:
        """Number of tokens per image."""
        return (self.image_size // self.patch_size // self.scale_factor) ** 2

    @model_validator(mode="after")
    def _check_image_sizes(self) -> "VisionTowerConfig":
        if self.image_size % (self.patch_size * self.scale_factor):
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size} times scale_factor "
                f"{self.scale_factor}"
            )
        if self.vision_hidden_size % self.vision_num_attention_heads:
            raise ValueError(
                f"vision_hidden_size {self.vision_hidden_size} must be a multiple of vision_num_attention_heads "
                f"{self.vision_num_attention_heads}"
            )
        return self


class ScratchConfigGroup(SettingsGroup):
    """New model"""

    dataset: str
    """Text for training the tokenizer: file, folder or Hub name. All text in its rows is used."""
    dataset_split: str = "train"
    """Split to load, if the dataset name contains none."""
    vocab_size: int = Field(4096, ge=300)
    """Maximum vocabulary size. A small dataset may give fewer tokens."""
    output: str
    """Folder for the new model; must not exist."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Random seed of the initial weights."""
