"""Optimisation, distribution, checkpoints and tracking."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin
from rlhf_cli.config.roles import FROZEN, ROLES

ZeroStage = Literal[0, 1, 2, 3]
OWN_SETTINGS_OF_ROLES = frozenset(
    f"deepspeed.{name}"
    for name in (
        "reward_zero_stage",
        "teacher_zero_stage",
        "reward_sequence_parallel_size",
        "ref_zero_stage",
        "ref_sequence_parallel_size",
        "teacher_sequence_parallel_size",
        "ref_offload",
        "critic_zero_stage",
        "critic_sequence_parallel_size",
    )
)
"""DeepSpeed settings of a single role, which commands with one model do not support."""

DEFAULT_TOKENS = 16_192
"""Tokens of a micro-batch at most, if neither a setting nor a GPU's memory sets another bound."""

OptimizerName = Literal["adamw", "adamw_8bit", "adamw_bf16", "muon"]


class BatchConfig(SettingsGroup):
    """Batches"""

    train_batch_size: int = Field(128, gt=0)
    """Sequences in one optimizer step, over all ranks; online at most: the steps of an iteration are equally large."""
    train_max_tokens_per_gpu: int | None = Field(None, gt=0)
    """Tokens in one packed micro-batch at most: the bound on activation memory. Four patches of a picture take the room
    of a token if they are more. By default 16,192, on a GPU as many of these as its memory holds."""
    micro_train_batch_size: int | None = Field(None, gt=0)
    """Sequences in one packed micro-batch at most; by default only the token bound counts."""
    max_epochs: int = Field(1, gt=0)
    """Passes over the data; online: over the responses of each iteration."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of every random choice of the run."""
    share_prompts: bool = True
    """Compute a prompt once for its responses in a micro-batch; requires attn_implementation varlen (CPU and CUDA)."""
    critic_update_steps: int | None = Field(None, gt=0)
    """Optimizer steps of even size into which the critic splits each pass over the responses; by default the actor's
    number."""
    freezing_actor_steps: int = Field(0, ge=-1)
    """Iterations at the start that train only the critic, while the engines keep their weights; -1 is 0."""
    max_steps: int | None = Field(None, gt=0)
    """Stop after this many optimizer steps."""
    eval_steps: int = Field(-1, ge=-1)
    """Optimizer steps between evaluations; -1 only at the end."""
    stop_eval_loss: float | None = None
    """Stop early once the evaluation loss is at or below this."""

    @property
    def max_tokens(self) -> int:
        """Tokens in one packed micro-batch at most."""
        return self.train_max_tokens_per_gpu or DEFAULT_TOKENS

    @property
    def critic_only_iterations(self) -> int:
        """Iterations at the start that train only the critic."""
        return max(0, self.freezing_actor_steps)


class OptimConfig(SettingsGroup):
    """Optimizer"""

    optim: OptimizerName = "adamw"
    """adamw: AdamW on a float32 copy of the weights. adamw_8bit: the same with moments of 8 bits (extra `quant`).
    adamw_bf16: weights and moments in bf16 with stochastic rounding, without a copy: 6 bytes a parameter instead of 14.
    muon (experimental): orthogonalized momentum for matrices of hidden layers, at the learning rate of AdamW, which
    trains the rest; not with ZeRO 3."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, which is added to the root of the second moment."""
    l2: float = Field(0.0, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""
    max_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 turns clipping off."""
    max_skipped_steps: int = Field(5, ge=0)
    """Optimizer steps in a row that may be skipped because loss or gradient is not finite, or iterations because no
    response can be trained on; one more ends the run."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts; above 0 a step takes one more forward pass."""
    lr_scheduler: Literal[
        "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial"
    ] = "cosine_with_min_lr"
    """Learning-rate schedule after warm-up. The first step after it has the peak, and no step has rate 0."""
    lr_warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Share of all steps in which the learning rate rises linearly; the last of them has the peak."""
    warmup_steps: Annotated[int | None, Excludes("lr_warmup_ratio")] = Field(None, ge=0)
    """Number of these steps, in place of the share."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate of cosine_with_min_lr as a share of the peak."""
    learning_rate: float = Field(5e-6, gt=0)
    """Peak learning rate; ten times as much by default if --lora_rank is given."""
    actor_learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of the actor; ten times as much by default if --lora_rank is given."""
    enable_ema: bool = False
    """Keep an exponential moving average of the actor's weights in host memory, and save it as a model, `ema`."""
    ema_beta: Annotated[float, Needs("enable_ema")] = Field(0.992, ge=0, lt=1)
    """Decay of the average per optimizer step."""
    critic_learning_rate: float = Field(9e-6, gt=0)
    """Peak learning rate of the critic; ten times as much by default if --lora_rank is given."""

    @model_validator(mode="after")
    def _rates_decay(self) -> "OptimConfig":
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {' '.join(f'{beta:g}' for beta in self.adam_betas)}: both from 0 to below 1")
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the steps in which the learning rate rises, of a run of so many steps."""
        return round(total_steps * self.lr_warmup_ratio) if self.warmup_steps is None else self.warmup_steps


class DeepSpeedConfig(SettingsGroup):
    """DeepSpeed"""

    zero_stage: ZeroStage = 2
    """What ZeRO partitions over ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights."""
    zpg: Annotated[int, Needs("zero_stage", (3,), when="partitions_weights")] = Field(1, gt=0)
    """ZeRO++ secondary partition size of stage 3 (GPUs of one node)."""
    adam_offload: bool = False
    """Keep optimizer states in host memory and step there (DeepSpeed CPU Adam)."""
    param_offload: Annotated[bool, Needs("zero_stage", (3,), when="partitions_weights"), Excludes("zpg")] = False
    """Keep weights that ZeRO 3 partitions in host memory, from which each layer is gathered when it is used."""
    grad_accum_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which gradients are added up; by default fp32, or bf16 for bf16 weights at stage 0."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with the backward pass, and at stage 3 the gathering of weights with computation. By
    default between several GPUs, but not with --adam_offload."""

    tensor_parallel_size: int = Field(1, gt=0)
    """Ranks that split the linear layers of the trained model's decoder, for models too large for their GPUs (DeepSpeed
    AutoTP, experimental). It divides the ranks and the model's key heads; not with --sequence_parallel_size."""
    sequence_parallel_size: int = Field(1, gt=0)
    """Ranks that share each sequence, for long ones: a micro-batch holds as many times --train_max_tokens_per_gpu. It
    divides the ranks of a model; needs attn_implementation varlen."""
    sequence_parallel_mode: Annotated[
        Literal["auto", "ulysses", "gather"], Needs("sequence_parallel_size", when="shares_sequences")
    ] = "auto"
    """What these ranks exchange in attention: ulysses tokens for heads, whose number the size divides; gather the keys
    of all tokens, which takes more memory. auto takes ulysses where it can."""
    ring_flash_attn: Annotated[bool, Needs("sequence_parallel_size", when="shares_sequences")] = False
    """Let ring-flash-attn gather the keys of some heads while it computes others. It needs a GPU and the extras flash
    and ring."""

    reward_zero_stage: ZeroStage | None = None
    """ZeRO stage of the reward model; zero_stage by default. Stage 3 partitions frozen weights, the others do not."""
    teacher_zero_stage: ZeroStage | None = None
    """ZeRO stage of the teacher; zero_stage by default."""
    reward_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the reward model that share each sequence; sequence_parallel_size by default."""
    ref_zero_stage: ZeroStage | None = None
    """ZeRO stage of the reference; zero_stage by default."""
    ref_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the reference that share each sequence; sequence_parallel_size by default."""
    teacher_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the teacher that share each sequence; sequence_parallel_size by default."""
    ref_offload: bool = False
    """Keep the weights of reference, reward model and teacher in host memory while they are not used."""
    critic_zero_stage: ZeroStage | None = None
    """ZeRO stage of the critic; zero_stage by default."""
    critic_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the critic that share each sequence; sequence_parallel_size by default."""

    @model_validator(mode="after")
    def _modes_are_of_shared_sequences(self) -> "DeepSpeedConfig":
        if self.ring_flash_attn and self.sequence_parallel_mode == "ulysses":
            raise ValueError("ring_flash_attn gathers keys: drop --sequence_parallel_mode ulysses")
        return self

    @property
    def ranks_per_pack(self) -> int:
        """Neighbouring ranks that get the same micro-batches, because they share its tokens or split the layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    def of(self, role: str) -> Self:
        """Return the settings of a role, one of `ROLES`."""
        own = {name: getattr(self, self.name_of(role, name)) for name in ("zero_stage", "sequence_parallel_size")}
        if role in FROZEN:
            own["param_offload"] = self.ref_offload or (self.param_offload and own["zero_stage"] == 3)
            own["tensor_parallel_size"] = 1  # only trained models are split
        return self.model_copy(update=own)

    def name_of(self, role: str, name: str) -> str:
        """Return the name of the setting that applies to a role: its own if that is given, else the common one."""
        own = f"{role}_{name}"
        return name if getattr(self, own, None) is None else own

    @property
    def partitions_weights(self) -> bool:
        """Whether any role uses ZeRO stage 3."""
        return any(self.of(role).zero_stage == 3 for role in ROLES)

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks of any role share a sequence."""
        return max(self.sequence_sizes) > 1

    @property
    def sequence_sizes(self) -> set[int]:
        """The sequence parallel sizes of all possible roles."""
        return {self.of(role).sequence_parallel_size for role in ROLES}


class LaunchConfig(SettingsGroup):
    """Launch"""

    num_processes: int = Field(1, gt=0)
    """Ranks on this machine; more than one starts the deepspeed launcher. Leave at 1 under a launcher."""


class CheckpointConfig(SettingsGroup):
    """Output"""

    output: str
    """Run directory: settings, metrics, samples, logs, report, checkpoints and the model."""
    save_path: str | None = None
    """Folder of the trained model in Hugging Face format; <output>/model by default."""
    ckpt_path: str | None = None
    """Where checkpoints are kept; <output>/checkpoints by default."""
    save_steps: int = Field(-1, ge=-1)
    """Steps (online: iterations) between checkpoints; -1 only when interrupted."""
    max_ckpt_num: int = Field(3, gt=0)
    """Checkpoints kept; older ones are removed after a newer one is complete."""
    load_checkpoint: bool = False
    """Continue from the newest complete checkpoint; starts fresh if there is none."""
    overwrite: Annotated[bool, Excludes("load_checkpoint")] = False
    """Replace what an earlier run left in the run directory."""
    max_restarts: int = Field(0, ge=0)
    """Times the run resumes by itself from its last checkpoint after one of its processes has died."""

    @model_validator(mode="after")
    def _restarts_need_checkpoints(self) -> "CheckpointConfig":
        if self.max_restarts and self.save_steps < 1:
            raise ValueError("max_restarts goes on from the last checkpoint, and none is saved: give save_steps")
        return self


class TrackingConfig(SettingsGroup):
    """Tracking"""

    logging_steps: int = Field(1, gt=0)
    """Steps between lines of the terminal output; metrics.jsonl always has every step."""
    use_tensorboard: bool = True
    """Write TensorBoard events to <output>/tensorboard."""
    use_wandb: bool = False
    """Log to Weights & Biases (extra `wandb`, key in WANDB_API_KEY)."""
    tracker: Annotated[
        str | None, Plugin((), ("run_directory", "settings", "resume_step"), methods=("log", "close"))
    ] = None
    """Class of your own that gets the metrics of each step as well."""
    wandb_project: str = "rlhf-cli"
    """Weights & Biases project."""
    wandb_org: str | None = None
    """Weights & Biases entity."""
    wandb_group: str | None = None
    """Weights & Biases group."""
    wandb_run_name: str | None = None
    """Weights & Biases run name; the run directory's name by default."""
