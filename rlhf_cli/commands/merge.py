"""`rlhf merge`: create a Hugging Face model from an adapter or a checkpoint."""

from typing import Literal

from pydantic import Field

from rlhf_cli.config.base import CommandConfig, SettingsGroup


class MergeGroup(SettingsGroup):
    """Merge"""

    model: str
    """Adapter folder, run directory that contains one, or checkpoint (runs/x/checkpoints/step_000020)."""
    output: str
    """Folder for the merged model; must not exist."""
    base: str | None = None
    """Base model of the adapter, or model with a checkpoint's frozen parts, if its location has changed since training:
    a folder or Hub name.
    """
    param_dtype: Literal["bf16", "fp32"] | None = None
    """Weight dtype of the output. Default: unchanged."""
    max_shard_size: float = Field(4.0, gt=0)
    """Maximum size of a weight file in GB. Merging needs about as much memory."""
    trust_remote_code: bool = False
    """Run Python code included with the model."""


class MergeConfig(CommandConfig):
    """Merge an adapter into the base model, or convert a checkpoint to a Hugging Face folder, and verify the result."""

    merge: MergeGroup
