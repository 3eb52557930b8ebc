"""Models, placement and tokens of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlhf_cli.backends.cluster.default_layout import memory_share
from rlhf_cli.backends.cluster.placement import JUDGE, Layout
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.serve_rm import ServeRMConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.scoring import JUDGE_MAX_LEN
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import adapter_folder
from rlhf_cli.planning.architectures import read_adapter
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.images import RowImages
from rlhf_cli.planning.memory import FOUR_BIT_BYTES, WEIGHT_BYTES, RoleMemory
from rlhf_cli.planning.shapes import ModelShape

TrainingConfig = OfflineConfig | OnlineConfig
Shapes = Callable[[str], ModelShape]
"""Returns the shape of a model by its name or folder."""
_INSTRUCTIONS, _VERDICT = 200, 100
"""Tokens of a judge's instructions and delimiters, and of a verdict with reasons: assumptions."""
CPU_PLACES = 1024
"""Number of processes that fit on a machine without GPUs."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of one step (online: iteration), over all ranks.

    - `trained`, `updates`: tokens in forward and backward passes, and optimizer steps.
    - `forward`: tokens in forward passes without gradients, by role.
    - `length`: mean sequence length.
    - `requests`, `prompt`, `response`: sampled responses, mean tokens of a prompt and of a response; `prefilled` counts
      prompt tokens that the engines compute.
    """

    trained: float = 0
    updates: int = 1
    forward: Mapping[str, float] = field(default_factory=dict)
    length: float = 0
    requests: int = 0
    prompt: float = 0
    response: float = 0
    prefilled: float = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A command on hardware, with all sizes filled in.

    - `roles`: models by role; `trained` are those with an optimizer. `hosts`: the role whose ranks hold a model.
    - `engine`, `judge`: rollout and judge engines.
    - `longest`: tokens of the longest sequence in a rank's part.
    - `models_sleep`, `engines_sleep`: whether they leave their GPUs when idle.
    - `samples_ahead`: engines sample for later iterations while the models train.
    - `images`: images of a row or prompt.
    - `steps`: steps of the whole run, None if the number of rows is unknown.
    """

    config: CommandConfig
    hardware: Hardware
    roles: Mapping[str, RoleMemory]
    layout: Layout
    tokens: Tokens
    longest: int
    hosts: Mapping[str, str] = field(default_factory=dict)
    engine: EngineMemory | None = None
    judge: EngineMemory | None = None
    models_sleep: bool = False
    engines_sleep: bool = False
    samples_ahead: bool = False
    reason: str = ""
    images: RowImages = field(default_factory=RowImages)
    steps: int | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles with an optimizer."""
        return tuple(name for name, role in self.roles.items() if role.num_trained)

    @property
    def serves(self) -> bool:
        """Whether the command's own process has the models and answers until it is stopped, so a run has no steps."""
        return isinstance(self.config, ChatConfig | ServeRMConfig)

    @property
    def judge_sleeps(self) -> bool:
        """Whether judge and rollout engines take turns."""
        return not self.hardware.is_cpu and any(seat.shared for seat in self.layout.of(JUDGE))

    @property
    def questions(self) -> Tokens:
        """Tokens of the questions to a judge model in a step, and of its verdicts (docs/rewards.md)."""
        assert self.judge is not None
        samples, tokens = self.config.setting("n_samples_per_prompt"), self.tokens
        # Questions per response, and responses that a question shows.
        each, shown = {"pairwise": (samples - 1, 2), "listwise": (2 / samples, samples)}.get(
            self.config.setting("judge_method"), (1, 1)
        )
        number = round(tokens.requests * each)
        longest = max(1, self.judge.max_len - _VERDICT)
        prompt = min(longest, _INSTRUCTIONS + tokens.prompt + shown * tokens.response)
        return Tokens(
            requests=number, prompt=prompt, response=_VERDICT, length=prompt + _VERDICT, prefilled=number * prompt
        )

    def host(self, role: str) -> str:
        """Return the role whose ranks hold this model."""
        return self.hosts.get(role, role)


def trained_role(
    config: TrainingConfig, shape: ModelShape, settings: DeepSpeedConfig, num_ranks: int, hardware: Hardware
) -> RoleMemory:
    """Return the memory settings of a trained model."""
    in_4bit = config.adapter.load_in_4bit
    value_bytes = WEIGHT_BYTES[config.model.param_dtype]
    role = RoleMemory(
        shape=shape,
        num_ranks=num_ranks,
        settings=settings,
        optimizer=config.optim.optim,
        weight_bytes=FOUR_BIT_BYTES if in_4bit else value_bytes,
        value_bytes=value_bytes,
        # On a CPU, they would go from host memory to host memory.
        offloads_activations=config.model.activation_offload and not hardware.is_cpu,
        has_gpus=not hardware.is_cpu,
        is_fused=_is_fused(config, hardware),
        keeps_scores=config.model.attn_implementation in ("auto", "eager") and not hardware.has_flash,
        num_blocks=_num_blocks(config),
    )
    return with_trained(role, config)


def _num_blocks(config: TrainingConfig) -> int:
    """Return the float32 blocks of logits that exist at a time: one more for an entropy bonus, or a teacher's."""
    has_bonus = config.setting("entropy_loss_coef") or config.setting("entropy_target")
    return 3 if has_bonus or config.command == "distill" else 2


def _is_fused(config: TrainingConfig, hardware: Hardware) -> bool:
    """Return whether a run uses Liger's kernels, if there are any for its model."""
    model = config.model
    if hardware.is_cpu or model.compile_model or model.use_liger_kernel is False:
        return False
    return bool(model.use_liger_kernel) or hardware.has_liger


def check_states(config: TrainingConfig, settings: DeepSpeedConfig) -> None:
    """Raise UsageError if a run rejects the settings of a trained model."""
    if settings.zero_stage == 3:
        needs_whole = {"load_in_4bit": config.adapter.load_in_4bit, "compile_model": config.model.compile_model}
        if given := next((name for name, value in needs_whole.items() if value), None):
            raise UsageError(f"--{given} cannot be combined with --zero_stage 3, which partitions weights")
    sleeps = isinstance(config, OnlineConfig) and bool(config.placement.deepspeed_enable_sleep)
    # Packages of this machine do not matter for a plan.
    optimizer = "adamw" if config.optim.optim == "adamw_8bit" else config.optim.optim
    check_deepspeed(settings, param_dtype=config.model.param_dtype, optimizer=optimizer, sleeps=sleeps)


def with_trained(role: RoleMemory, config: TrainingConfig) -> RoleMemory:
    adapter, rank = config.adapter, adapter_rank(config)
    if not rank:
        return replace(role, num_trained=role.shape.parameters)
    trained = role.shape.adapter_parameters(rank, adapter.target_modules, adapter.exclude_modules)
    return replace(role, num_trained=trained)


def adapter_rank(config: TrainingConfig) -> int:
    """Return the rank of the trained adapter, new or loaded; 0 without one."""
    folder = adapter_folder(config.model.pretrain)
    return int(config.adapter.lora_rank or (0 if folder is None else read_adapter(folder, "r")))


def frozen_role(role: RoleMemory, shape: ModelShape, settings: DeepSpeedConfig, num_ranks: int) -> RoleMemory:
    """Return a frozen model of a run with the dtype of a trained one."""
    weights = role.value_bytes
    return replace(role, shape=shape, num_trained=0, settings=settings, num_ranks=num_ranks, weight_bytes=weights)


def mean_lengths(max_len: int, max_new_tokens: int, plan: PlanConfig, images: RowImages) -> tuple[float, float]:
    """Return the mean tokens of prompts and responses, as given or half of their limits.

    Raises UsageError if the images of a prompt do not fit.
    """
    room = max(2, max_len - max_new_tokens)
    return images.mean_length(plan.prompt_tokens, room), plan.response_tokens or max_new_tokens / 2


def trains_vision(config: TrainingConfig) -> bool:
    """Return whether the vision encoder is trained, if the model has one."""
    adapter = config.adapter
    return adapter.lora_vision_tower if adapter_rank(config) else not config.model.freeze_vision_tower


def engine_of(
    config: OnlineConfig | InferenceConfig, shape: ModelShape, hardware: Hardware, *, shared: bool
) -> EngineMemory:
    """Return the memory settings of a rollout engine."""
    engine, sampling = config.engine, config.rollout if isinstance(config, OnlineConfig) else config.sampling
    return EngineMemory(
        shape=shape,
        gpu_bytes=hardware.memory,
        share=memory_share(engine.vllm_gpu_memory_utilization, shared=shared),
        size=engine.vllm_tensor_parallel_size or 1,
        value_bytes=WEIGHT_BYTES[config.model.param_dtype],
        max_len=config.prompts.max_len,
        requests=sampling.rollout_batch_size * sampling.n_samples_per_prompt,
        num_sequences=_num_sequences(engine.engine_arguments),
        is_eager=bool(engine.enforce_eager),
        is_vllm=engine.rollout_backend in ("auto", "vllm"),
        has_gpus=not hardware.is_cpu,
    )


def judge_of(
    config: OnlineConfig | InferenceConfig, shapes: Shapes, hardware: Hardware, *, shared: bool
) -> EngineMemory | None:
    """Return the memory settings of a judge engine, if the command starts one."""
    reward = config.reward
    if not reward.starts_judge:
        return None
    policy, shape = engine_of(config, shapes(reward.judge[0]), hardware, shared=shared), shapes(reward.judge[0])
    return replace(
        policy,
        size=reward.judge_tensor_parallel_size,
        max_len=reward.judge_max_len or min(JUDGE_MAX_LEN, shape.positions or JUDGE_MAX_LEN),
        num_sequences=None,
        is_vllm=True,
    )


def _num_sequences(arguments: Mapping[str, object]) -> int | None:
    given = arguments.get("max_num_seqs")
    return given if isinstance(given, int) else None
