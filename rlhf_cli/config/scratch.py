"""The shape of a small model made from nothing."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup


class ArchitectureConfig(SettingsGroup):
    """Architecture (Qwen2, or the decoder of Idefics3)"""

    hidden_size: int = Field(256, gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(1024, gt=0)
    """Width of the MLP."""
    num_hidden_layers: int = Field(8, gt=0)
    """Layers."""
    num_attention_heads: int = Field(8, gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(2, gt=0)
    """Key and value heads."""
    max_position_embeddings: int = Field(2048, gt=0)
    """Longest sequence in tokens."""
    initializer_range: float = Field(0.02, gt=0)
    """Spread of the random weights; narrow models learn sooner with about one over the root of the width."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output matrix too."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ArchitectureConfig":
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
    """Longest side of pictures in pixels: the model is an Idefics3 with a Llama decoder then; 0 for a text model."""
    patch_size: int = Field(14, gt=0)
    """Side of the squares in pixels that pictures are cut into."""
    scale_factor: int = Field(2, gt=0)
    """Neighbouring patches in each direction that become one token."""
    vision_hidden_size: int = Field(96, gt=0)
    """Width of the tower's residual stream; its MLPs are twice as wide."""
    vision_num_hidden_layers: int = Field(2, gt=0)
    """Layers of the tower."""
    vision_num_attention_heads: int = Field(3, gt=0)
    """Heads of the tower."""

    @property
    def num_image_tokens(self) -> int:
        """Tokens of a picture."""
        return (self.image_size // self.patch_size // self.scale_factor) ** 2

    @model_validator(mode="after")
    def _parts_divide(self) -> "VisionTowerConfig":
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
    """Text the tokenizer is trained on: file, folder or Hub name; all text in its rows is used."""
    dataset_split: str = "train"
    """Split to read if the name gives none."""
    vocab_size: int = Field(4096, ge=300)
    """Tokens of the vocabulary at most; a small data set may not yield as many."""
    output: str
    """Folder of the new model; must not exist."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of the random weights."""
