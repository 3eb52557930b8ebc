"""Which model is loaded, and how it is run in training."""

from typing import Literal

from rlhf_cli.config.base import Group


class ModelSource(Group):
    """Model"""

    pretrain: str
    """Model to start from: a local folder, a run directory of this program, or a Hugging Face name."""
    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the weights in forward and backward; optimizer states are always float32."""
    tokenizer_chat_template: str | None = None
    """Chat template to use instead of the tokenizer's: a Jinja file or the template itself."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class ModelConfig(ModelSource):
    """Model"""

    attn_implementation: Literal[
        "auto", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"
    ] = "auto"
    """Attention kernel for packed sequences; auto takes the fastest that is installed and fits the device."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more compute."""
    compile_model: bool = False
    """Compile the decoder with torch.compile: faster steps after a minute or two of compiling; not with ZeRO-3."""
    use_liger_kernel: bool = False
    """Use Liger's fused Triton kernels for norms, rotary embeddings and MLPs (CUDA, extra `liger`)."""
