"""The settings of `rlhf merge`."""

from typing import Literal

from pydantic import Field

from rlhf_cli.config.base import CommandConfig, SettingsGroup


class MergeGroup(SettingsGroup):
    """Merge"""

    model: str
    """Adapter folder, run directory that ends with one, or checkpoint (runs/x/checkpoints/step_000020)."""
    output: str
    """Folder of the whole model; must not exist."""
    base: str | None = None
    """Present place of the model under the adapter, or of the model with a checkpoint's frozen parts, if it differs
    from training: a folder or Hub name."""
    param_dtype: Literal["bf16", "fp32"] | None = None
    """Type of the weights written; by default the one they have."""
    max_shard_size: float = Field(4.0, gt=0)
    """Largest file of weights in GB, and about the memory that is needed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class MergeConfig(CommandConfig):
    """Settings of `rlhf merge`."""

    merge: MergeGroup
