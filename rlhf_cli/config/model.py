"""Model selection, and training options of models."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.environment import fast_dtype

ParamDtype = Annotated[
    Literal["auto", "bf16", "fp32"], AfterValidator(lambda dtype: fast_dtype()[0] if dtype == "auto" else dtype)
]
"""Weight dtype. A validated setting is never `auto`: it is resolved when settings are read, and stored in config.yaml
and the run's identity.
"""


class ModelSource(SettingsGroup):
    """Model"""

    pretrain: str
    """Model: a local folder, a GGUF file, a run directory, a checkpoint, an adapter, or a Hugging Face name."""
    tokenizer_chat_template: str | None = None
    """Chat template that replaces the tokenizer's: a Jinja file, or the template text."""
    trust_remote_code: bool = False
    """Run Python code included with the model."""
    param_dtype: ParamDtype = Field("auto", validate_default=True)
    """Weight dtype in forward and backward passes. auto is bf16 where it is fast (GPUs, AMX, AVX512-BF16), else fp32.
    The optimizer determines the dtype of its states.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, values: Any) -> Any:
        # "auto" comes from scripts of other tools.
        is_auto = isinstance(values, dict) and values.get("param_dtype") == "auto"
        return {name: value for name, value in values.items() if name != "param_dtype"} if is_auto else values


class ModelConfig(ModelSource):
    """Model"""

    pretrain: str
    """Model to start from: a local folder, a GGUF file, a run directory, or a Hugging Face name."""
    attn_implementation: Literal[
        "auto", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"
    ] = "auto"
    """Attention kernel for packed sequences. auto selects the fastest one installed and supported by the device."""
    gradient_checkpointing: bool | None = None
    """Recompute layers in the backward pass: saves memory for about a third more compute. Default: if activations do
    not fit in memory, as reported at startup.
    """
    activation_offload: Annotated[bool, Needs("gradient_checkpointing"), Excludes("compile_model")] = False
    """Offload the layer inputs saved by --gradient_checkpointing to host memory until the backward pass."""
    compile_model: bool = False
    """Compile the decoder with torch.compile: faster steps after one to two minutes of compilation. Not supported with
    ZeRO-3.
    """
    use_liger_kernel: bool | None = None
    """Use Liger's fused Triton kernels for norms, rotary embeddings and MLPs (CUDA, extra `liger`). Default: if
    installed and supported for the model type, and --compile_model does not already fuse these operations.
    """

    freeze_vision_tower: bool = False
    """Freeze the vision encoder of a vision-language model, and train the projector and language model."""
    freeze_projector: bool = False
    """Freeze the projector between vision encoder and language model (the merger in Qwen-VL)."""
    keep_dropout: bool = False
    """Train with the dropout in the model's config.json (attention_dropout, resid_pdrop, ...), which is disabled by
    default. Independent of --lora_dropout.
    """


class ReferenceConfig(SettingsGroup):
    """Reference"""

    ref_pretrain: str | None = None
    """Reference model. Default: the initial model (with an adapter: its base model)."""
    precompute_ref_log_probs: Annotated[bool, Excludes("ref_sync_steps")] = False
    """Compute reference log-probs for all data before training, and cache them for later runs."""
    ref_offload: bool = False
    """Offload idle reference weights to host memory."""
    ref_sync_steps: int = Field(0, ge=0)
    """Update the reference toward the trained model every N steps (online: iterations), as in TR-DPO; 0 keeps it
    fixed.
    """
    ref_mixup_alpha: Annotated[float, Needs("ref_sync_steps")] = Field(1.0, gt=0, le=1)
    """Weight of the trained model in each reference update."""

    @property
    def moves(self) -> bool:
        """Whether the reference is updated during training."""
        return self.ref_sync_steps > 0


class LoraConfig(SettingsGroup):
    """Adapter (LoRA)"""

    lora_rank: int = Field(0, ge=0)
    """LoRA rank; the base model stays frozen. 0 trains the full model."""
    lora_alpha: int = Field(16, gt=0)
    """LoRA scaling: the adapter's output is multiplied by lora_alpha / lora_rank."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_rank) instead, so that learning speed does not drop at high ranks (rsLoRA)."""
    use_dora: bool = False
    """Train the magnitude of weight rows separately from their direction (DoRA): often better at low ranks, but
    slower.
    """
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """LoRA dropout."""
    target_modules: list[str] = ["all-linear"]
    """Linear layers with an adapter, such as q_proj,v_proj. all-linear selects all except the LM head."""
    exclude_modules: list[str] = []
    """Layers without an adapter even if target_modules selects them, such as o_proj or layers.0.mlp.up_proj."""
    lora_vision_tower: bool = False
    """Also add adapters to the vision encoder and projector of a vision-language model, not only to the language
    model.
    """
    load_in_4bit: bool = False
    """Load the base model in 4 bits (NF4). Requires an NVIDIA GPU and the extra `quant`; not supported with ZeRO-3."""
    lora_push: Literal["merged", "adapter"] = "merged"
    """Weights pushed to the engines after each iteration: the merged model, or only the adapter, which vLLM applies
    during generation (not with use_dora). Adapter pushes are small, but generation is slightly slower.
    """
