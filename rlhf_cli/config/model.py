"""Which model is loaded, and how it is run in training."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.environment import fast_dtype

ParamDtype = Annotated[
    Literal["auto", "bf16", "fp32"], AfterValidator(lambda dtype: fast_dtype()[0] if dtype == "auto" else dtype)
]
"""A type of weights. A checked setting never is `auto`: the type is chosen when the settings are read, and kept in
config.yaml and in the identity of a run."""


class ModelSource(SettingsGroup):
    """Model"""

    pretrain: str
    """Model to start from: a local folder, a GGUF file, a run directory of this program, or a Hugging Face name. For
    generate also a checkpoint or an adapter."""
    tokenizer_chat_template: str | None = None
    """Chat template to use instead of the tokenizer's: a Jinja file or the template itself."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    param_dtype: ParamDtype = Field("auto", validate_default=True)
    """Type of the weights in forward and backward; auto is bf16 where its products are fast (GPUs, AMX, AVX512-BF16),
    else fp32. The type of optimizer states is up to the optimizer."""

    @model_validator(mode="before")
    @classmethod
    def _auto_is_the_default(cls, values: Any) -> Any:
        is_auto = isinstance(values, dict) and values.get("param_dtype") == "auto"
        return {name: value for name, value in values.items() if name != "param_dtype"} if is_auto else values


class ModelConfig(ModelSource):
    """Model"""

    attn_implementation: Literal[
        "auto", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"
    ] = "auto"
    """Attention kernel for packed sequences; auto takes the fastest that is installed and fits the device."""
    gradient_checkpointing: bool | None = None
    """Recompute layers in the backward pass: less memory, about a third more compute. By default on a GPU whose memory
    does not hold the activations of a micro-batch, which a line at the start shows."""
    activation_offload: Annotated[bool, Needs("gradient_checkpointing"), Excludes("compile_model")] = False
    """Keep the inputs of layers, which --gradient_checkpointing saves, in host memory until the backward pass."""
    compile_model: bool = False
    """Compile the decoder with torch.compile: faster steps after a minute or two of compiling; not with ZeRO-3."""
    use_liger_kernel: bool | None = None
    """Use Liger's fused Triton kernels for norms, rotary embeddings and MLPs (CUDA, extra `liger`). By default if they
    are installed, know the type of the model, and --compile_model does not fuse the same operations."""

    freeze_vision_tower: bool = False
    """Leave the vision tower of a vision-language model as it is, and train the projector and the language part."""
    freeze_projector: bool = False
    """Leave the projector between vision tower and language part (the merger of Qwen-VL) as it is."""
    keep_dropout: bool = False
    """Train with the dropout of the model's config.json (attention_dropout, resid_pdrop, ...), which is off by default.
    --lora_dropout is another setting."""


class ReferenceConfig(SettingsGroup):
    """Reference"""

    ref_pretrain: str | None = None
    """Model that the trained one is compared with; by default the start model (under an adapter: its base)."""
    precompute_ref_log_probs: Annotated[bool, Excludes("ref_sync_steps")] = False
    """Compute the reference's log-probabilities of all data before training, and keep them for other runs."""
    ref_offload: bool = False
    """Keep the reference's weights in host memory while it is not used."""
    ref_sync_steps: int = Field(0, ge=0)
    """Steps (online: iterations) after which the reference moves towards the trained model (TR-DPO); 0: it stays."""
    ref_mixup_alpha: Annotated[float, Needs("ref_sync_steps")] = Field(1.0, gt=0, le=1)
    """Share of the trained model's weights in the reference after each such move."""

    @property
    def moves(self) -> bool:
        """Whether the reference follows the policy."""
        return self.ref_sync_steps > 0


class CriticModelConfig(SettingsGroup):
    """Critic"""

    critic_pretrain: str | None = None
    """Model that the critic starts from, by default the actor's: a language model, or a reward model, whose head it
    keeps; same token ids."""


class LoraConfig(SettingsGroup):
    """Adapter (LoRA)"""

    lora_rank: int = Field(0, ge=0)
    """Train an adapter of this rank and leave the model itself as it is; 0 trains the model."""
    lora_alpha: int = Field(16, gt=0)
    """Strength of the adapter: its product of matrices is scaled by lora_alpha / lora_rank."""
    use_rslora: bool = False
    """Scale it by lora_alpha / sqrt(lora_rank) instead, so that large ranks learn as fast as small ones (rsLoRA)."""
    use_dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA): often better at low ranks, slower."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of a layer's inputs that the adapter does not see in a training step."""
    target_modules: list[str] = ["all-linear"]
    """Names of the linear layers that get an adapter (q_proj,v_proj); all-linear: every one but the head."""
    exclude_modules: list[str] = []
    """Names of layers that get none although target_modules names them: o_proj, or layers.0.mlp.up_proj."""
    lora_vision_tower: bool = False
    """Put adapters on the vision tower and the projector of a vision-language model too, not on its language part
    alone."""
    load_in_4bit: bool = False
    """Keep the model under the adapter in 4 bits (NF4; NVIDIA GPU, extra `quant`, not with ZeRO-3)."""
    lora_push: Literal["merged", "adapter"] = "merged"
    """What engines get after each iteration: the whole merged weights, or the adapter alone, which vLLM adds to the
    model while it generates (not with use_dora): pushes are small, generation is a little slower."""
