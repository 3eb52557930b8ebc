"""Settings for optimization, distribution, checkpoints and tracking."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin

ZeroStage = Literal[0, 1, 2, 3]

DEFAULT_TOKENS = 16_192
"""Default maximum tokens per micro-batch, unless set or determined by GPU memory."""

OptimizerName = Literal["adamw", "adamw_8bit", "adamw_bf16", "muon"]


class BatchConfig(SettingsGroup):
    """Batches"""

    train_batch_size: int = Field(128, gt=0)
    """Sequences per optimizer step, over all ranks. Online, this is a maximum: all steps of an iteration have equal
    size.
    """
    train_max_tokens_per_gpu: int | None = Field(None, gt=0)
    """Maximum tokens per packed micro-batch, which limits activation memory. Four image patches count as one token if
    that is more.
    Default: 16,192; with less memory, the largest multiple of 512 that fits.
    """
    micro_train_batch_size: int | None = Field(None, gt=0)
    """Maximum sequences per packed micro-batch. Default: limited only by tokens."""
    max_epochs: int = Field(1, gt=0)
    """Epochs over the data; online: over each iteration's responses."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Random seed of the run."""
    share_prompts: bool = True
    """Compute a prompt once for its responses in a micro-batch. Requires attn_implementation varlen (CPU and CUDA)."""
    max_steps: int | None = Field(None, gt=0)
    """Stop after this number of optimizer steps."""
    eval_steps: int = Field(-1, ge=-1)
    """Evaluate every N optimizer steps; -1 only at the end."""
    stop_eval_loss: float | None = None
    """Stop training when the evaluation loss is at or below this value."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens per packed micro-batch."""
        return self.train_max_tokens_per_gpu or DEFAULT_TOKENS


class OptimConfig(SettingsGroup):
    """Optimizer"""

    optim: OptimizerName = "adamw"
    """adamw: AdamW with float32 master weights. adamw_8bit: the same with 8-bit moments (extra `quant`). adamw_bf16:
    bf16 weights and moments with stochastic rounding and no master weights, 6 instead of 14 bytes per parameter. muon
    (experimental): orthogonalized momentum for hidden-layer matrices, with AdamW and the same learning rate for the
    rest; not supported with ZeRO-3.
    """
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for first and second moments."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the square root of the second moment."""
    l2: float = Field(0.0, ge=0)
    """Decoupled weight decay. Not applied to biases and norms."""
    max_norm: float = Field(1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping."""
    max_skipped_steps: int = Field(5, ge=0)
    """Maximum consecutive optimizer steps that may be skipped because of a non-finite loss or gradient, or iterations
    without trainable responses. One more stops the run.
    """
    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the mixture-of-experts load-balancing loss. Above 0, each step runs an additional forward pass."""
    lr_scheduler: Literal[
        "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial"
    ] = "cosine_with_min_lr"
    """Learning-rate schedule after warm-up. The first step after warm-up uses the peak, and no step uses 0."""
    lr_warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Fraction of steps for linear warm-up. The last warm-up step uses the peak."""
    warmup_steps: Annotated[int | None, Excludes("lr_warmup_ratio")] = Field(None, ge=0)
    """Number of warm-up steps. Overrides lr_warmup_ratio."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate of cosine_with_min_lr as a fraction of the peak."""
    learning_rate: float = Field(5e-6, gt=0)
    """Peak learning rate. Default: ten times higher with --lora_rank."""
    actor_learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of the actor. Default: ten times higher with --lora_rank."""
    enable_ema: bool = False
    """Keep an exponential moving average of the actor's weights in host memory, and save it as a model, `ema`."""
    ema_beta: Annotated[float, Needs("enable_ema")] = Field(0.992, ge=0, lt=1)
    """Decay of the average per optimizer step."""

    @model_validator(mode="after")
    def _check_betas(self) -> "OptimConfig":
        # Pydantic has no bounds for the elements of a tuple.
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {' '.join(f'{beta:g}' for beta in self.adam_betas)}: both from 0 to below 1")
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run with `total_steps` steps."""
        return round(total_steps * self.lr_warmup_ratio) if self.warmup_steps is None else self.warmup_steps


class DeepSpeedConfig(SettingsGroup):
    """DeepSpeed"""

    zero_stage: ZeroStage = 2
    """ZeRO stage: partition nothing (0), optimizer states (1), and gradients (2), and weights (3)."""
    zpg: Annotated[int, Needs("zero_stage", (3,), when="partitions_weights")] = Field(1, gt=0)
    """ZeRO++ secondary partition size for stage 3 (GPUs in a node)."""
    adam_offload: bool = False
    """Offload optimizer states and steps to the CPU (DeepSpeed CPU Adam)."""
    param_offload: Annotated[bool, Needs("zero_stage", (3,), when="partitions_weights"), Excludes("zpg")] = False
    """Offload ZeRO-3 weights to host memory; each layer is gathered when used."""
    grad_accum_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype for gradient accumulation. Default: fp32, or bf16 for bf16 weights at stage 0."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with the backward pass, and weight gathering at stage 3 with computation. Default:
    with several GPUs and without --adam_offload.
    """

    tensor_parallel_size: int = Field(1, gt=0)
    """Tensor parallel size: ranks that split the linear layers of the trained decoder (DeepSpeed AutoTP, experimental).
    It must divide the number of ranks and the model's key heads. Not supported with --sequence_parallel_size.
    """
    sequence_parallel_size: int = Field(1, gt=0)
    """Sequence parallel size: ranks that share each sequence, for long sequences. Multiplies --train_max_tokens_per_gpu
    per micro-batch. It must divide a model's number of ranks, and requires attn_implementation varlen.
    """
    sequence_parallel_mode: Annotated[
        Literal["auto", "ulysses", "gather"], Needs("sequence_parallel_size", when="shares_sequences")
    ] = "auto"
    """Attention communication in sequence parallelism: ulysses exchanges tokens for heads, and the size must divide the
    number of heads; gather collects all keys, which uses more memory. auto uses ulysses if possible.
    """
    ring_flash_attn: Annotated[bool, Needs("sequence_parallel_size", when="shares_sequences")] = False
    """Overlap key gathering with computation by ring-flash-attn. Requires a GPU and the extras flash and ring."""

    @model_validator(mode="after")
    def _check_sequence_parallel_mode(self) -> "DeepSpeedConfig":
        # Ring attention passes keys between ranks, Ulysses exchanges heads.
        if self.ring_flash_attn and self.sequence_parallel_mode == "ulysses":
            raise ValueError("ring_flash_attn gathers keys: remove --sequence_parallel_mode ulysses")
        return self

    @property
    def ranks_per_pack(self) -> int:
        """Adjacent ranks that receive the same micro-batches, because they share sequences or split layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size


class LaunchConfig(SettingsGroup):
    """Launch"""

    num_processes: int = Field(1, gt=0)
    """Ranks on this machine. More than one starts the DeepSpeed launcher. Keep 1 under an external launcher."""


class CheckpointConfig(SettingsGroup):
    """Output"""

    output: str
    """Run directory for settings, metrics, samples, logs, report, checkpoints and model."""
    save_path: str | None = None
    """Folder for the trained model in Hugging Face format. Default: <output>/model."""
    ckpt_path: str | None = None
    """Folder for checkpoints. Default: <output>/checkpoints."""
    save_steps: int = Field(-1, ge=-1)
    """Save a checkpoint every N steps (online: iterations); -1 only when interrupted."""
    max_ckpt_num: int = Field(3, gt=0)
    """Maximum number of checkpoints. Older ones are removed after a new one is complete."""
    load_checkpoint: bool = False
    """Resume from the latest complete checkpoint; starts from scratch if there is none."""
    overwrite: Annotated[bool, Excludes("load_checkpoint")] = False
    """Replace an earlier run in the run directory."""
    max_restarts: int = Field(0, ge=0)
    """Maximum automatic restarts from the last checkpoint after a process has died."""

    @model_validator(mode="after")
    def _check_restarts(self) -> "CheckpointConfig":
        if self.max_restarts and self.save_steps < 1:
            raise ValueError("max_restarts resumes from the last checkpoint, but none is saved: set save_steps")
        return self


class TrackingConfig(SettingsGroup):
    """Tracking"""

    logging_steps: int = Field(1, gt=0)
    """Print every N steps to the terminal. metrics.jsonl always contains all steps."""
    print_samples: int = Field(0, ge=0)
    """Print this many responses of each iteration to the terminal, with prompt, reward and advantage. Trackers show the
    same responses as a table; 4 if this is 0.
    """
    on_event: str | None = None
    """Shell command to run at the start, end, failure and alarms of the run. It reads the event as JSON from stdin."""
    use_tensorboard: bool = True
    """Write TensorBoard events to <output>/tensorboard."""
    use_wandb: bool = False
    """Log to Weights & Biases (extra `wandb`, key in WANDB_API_KEY)."""
    use_mlflow: bool = False
    """Log to MLflow (extra `mlflow`, server in MLFLOW_TRACKING_URI; without one, to ./mlflow.db)."""
    use_trackio: bool = False
    """Log to Trackio on this machine, or to the Space in TRACKIO_SPACE_ID (extra `trackio`)."""
    use_swanlab: bool = False
    """Log to SwanLab (extra `swanlab`, key in SWANLAB_API_KEY)."""
    tracker: Annotated[
        str | None, Plugin((), ("run_directory", "settings", "resume_step"), methods=("log", "close"))
    ] = None
    """Your own tracker class, which also receives the metrics of each step."""
    wandb_project: str = "rlhf-cli"
    """Project in Weights & Biases, Trackio and SwanLab; experiment in MLflow."""
    wandb_org: str | None = None
    """Weights & Biases entity."""
    wandb_group: str | None = None
    """Group in Weights & Biases, Trackio and SwanLab."""
    wandb_run_name: str | None = None
    """Run name in Weights & Biases, MLflow, Trackio and SwanLab. Default: the run directory's name."""
