"""Settings for `rlhf serve-tinker`: the served model, its adapters and the address."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.serve import AddressConfig

TINKER_KEY = "TINKER_API_KEY"
"""Environment variable from which Tinker's client reads its API key."""
TINKER_KEY_PREFIX = "tml-"
"""Tinker's client refuses other keys."""


DEFAULT_MAX_LEN = 8192
"""Highest default of max_len."""


class TinkerModelConfig(SettingsGroup):
    """Adapters"""

    model_name: str | None = None
    """Name by which clients select the model (base_model), such as Qwen/Qwen3-8B. Default: --pretrain."""
    lora_alpha: int = Field(32, gt=0)
    """LoRA scaling: the output of adapters is multiplied by lora_alpha / rank. Clients choose the rank."""
    lora_push: Literal["merged", "adapter"] = "merged"
    """Weights pushed to the engine before it samples from a checkpoint: the merged model, or only the adapter, which
    vLLM applies during generation. Adapter pushes are small, but generation is slightly slower.
    """
    max_lora_rank: Annotated[int, Needs("lora_push", ("adapter",))] = Field(64, gt=0, le=512)
    """Highest rank that clients may choose; vLLM reserves memory for it."""
    max_len: int | None = Field(None, gt=1)
    """Maximum length in tokens of a training sequence, and of a prompt with its response. Default: the positions of the
    model, at most 8192.
    """
    max_tokens_per_gpu: int = Field(16_384, gt=1)
    """Maximum tokens per packed forward pass in training, which limits memory use."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: saves memory for about a third more compute."""
    max_models: int = Field(8, gt=0)
    """Maximum number of models in training at once, over all clients. Each needs memory for its adapter, gradient and
    optimizer states. If all are taken, those of finished sessions are removed.
    """
    max_snapshots: int = Field(8, gt=0)
    """Newest weights of each model that are kept for sampling clients without a checkpoint name."""
    output: str = "runs/tinker"
    """Folder for checkpoints, which later servers with the same model find again."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Random seed for sampling requests and adapters without a seed of their own."""

    @model_validator(mode="after")
    def _check_token_limit(self) -> Self:
        longest = self.max_len or DEFAULT_MAX_LEN
        if longest > self.max_tokens_per_gpu:
            raise ValueError(
                f"max_tokens_per_gpu {self.max_tokens_per_gpu} is less than max_len {longest}: raise "
                "max_tokens_per_gpu or lower max_len"
            )
        return self


class TinkerServerConfig(AddressConfig):
    """Server"""

    port: int = Field(8010, ge=0, le=65_535)
    """Port to listen on; 0 selects a free port."""
    api_key_env: str = TINKER_KEY
    """Environment variable with the API key for clients, which starts with tml-. If unset, a key is generated and
    printed.
    """
    max_body_mb: float = Field(64.0, gt=0)
    """Maximum request size in MB (status 413)."""
