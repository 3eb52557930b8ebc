"""Settings for `rlhf serve-rm`: model, address and limits; the address of all servers."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.model import ParamDtype
from rlhf_cli.config.scoring import REMOTE_RM_KEY

TEXTS_TOGETHER = 256
"""Maximum texts scored in one batch, across requests."""


class ServedModelConfig(SettingsGroup):
    """Model"""

    param_dtype: ParamDtype = Field("auto", validate_default=True)
    """Weight dtype of the reward model. auto is bf16 where it is fast, else fp32."""
    max_len: int = Field(8192, gt=1)
    """Maximum length of a text for the reward model in tokens. Longer texts fail."""
    max_tokens_per_gpu: int = Field(16_384, gt=1)
    """Maximum tokens per packed forward pass, which limits memory use."""
    trust_remote_code: bool = False
    """Run Python code included with the model."""

    @model_validator(mode="after")
    def _check_token_limit(self) -> "ServedModelConfig":
        if self.max_len > self.max_tokens_per_gpu:
            raise ValueError(
                f"max_tokens_per_gpu {self.max_tokens_per_gpu} is less than max_len {self.max_len}: raise "
                "max_tokens_per_gpu or lower max_len"
            )
        return self


class AddressConfig(SettingsGroup):
    """Address and key of a server; subclasses set `port` and `api_key_env`."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback (127.0.0.1, ::1) require a key in api_key_env."""
    port: int
    api_key_env: str


class ServeConfig(AddressConfig):
    """Server"""

    port: int = Field(5000, ge=0, le=65_535)
    """Port to listen on; 0 selects a free port."""
    api_key_env: str = REMOTE_RM_KEY
    """Environment variable with the API key for clients. If unset, a key is generated and printed."""
    max_queue: int = Field(4096, gt=0)
    """Maximum number of queued texts. Requests that do not fit get status 503 and may be retried."""
    max_texts: int = Field(256, gt=0)
    """Maximum texts per request (status 413)."""
    max_chars: int = Field(400_000, gt=0)
    """Maximum characters per text (status 422)."""
    max_images: int = Field(8, ge=0)
    """Maximum images per text (status 422)."""
    max_body_mb: float = Field(16.0, gt=0)
    """Maximum request size in MB (status 413)."""

    @model_validator(mode="after")
    def _check_queue_size(self) -> "ServeConfig":
        if self.max_texts > self.max_queue:
            raise ValueError(f"max_queue {self.max_queue} is less than max_texts {self.max_texts} of a request")
        return self
