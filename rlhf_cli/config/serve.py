"""What `rlhf serve-rm` serves, where, and within which bounds."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.model import ParamDtype
from rlhf_cli.config.scoring import REMOTE_RM_KEY


class ServedModelConfig(SettingsGroup):
    """Model"""

    param_dtype: ParamDtype = Field("auto", validate_default=True)
    """Type of the reward model's weights; auto is bf16 where its products are fast, else fp32."""
    max_len: int = Field(8192, gt=1)
    """Tokens of a text that the reward model reads at most; the reward of a longer one fails."""
    max_tokens_per_gpu: int = Field(16_384, gt=1)
    """Tokens in one packed forward pass at most: the bound on memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _a_text_fits(self) -> "ServedModelConfig":
        if self.max_len > self.max_tokens_per_gpu:
            raise ValueError(
                f"max_tokens_per_gpu {self.max_tokens_per_gpu} cannot hold a text of max_len {self.max_len}: raise the "
                "one or lower the other"
            )
        return self


class ServeConfig(SettingsGroup):
    """Server"""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own (127.0.0.1, ::1) needs a key in api_key_env."""
    port: int = Field(5000, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    api_key_env: str = REMOTE_RM_KEY
    """Environment variable with the key that clients have to show; if it is not set, a key is made and printed."""
    max_queue: int = Field(4096, gt=0)
    """Texts that may wait; a request that finds no room gets status 503 and may be sent again."""
    max_texts: int = Field(256, gt=0)
    """Texts in a request at most (413)."""
    max_chars: int = Field(400_000, gt=0)
    """Characters of a text at most (422)."""
    max_images: int = Field(8, ge=0)
    """Pictures of a text at most (422)."""
    max_body_mb: float = Field(16.0, gt=0)
    """Size of a request in MB at most (413)."""

    @model_validator(mode="after")
    def _a_request_fits(self) -> "ServeConfig":
        if self.max_texts > self.max_queue:
            raise ValueError(f"max_queue {self.max_queue} has no room for a request of max_texts {self.max_texts}")
        return self
