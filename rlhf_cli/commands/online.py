"""Settings of commands that train on sampled responses."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from rlhf_cli.command_table import COMMANDS, POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import LayoutSettings, PlacementConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.presets import defaults_of_adapter, defaults_of_loss, defaults_of_roles
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.roles import (
    ROLES,
    CriticConfig,
    KLTerm,
    OnlineReferenceConfig,
    RewardRanksConfig,
    Role,
    TeacherConfig,
)
from rlhf_cli.config.rollout import AsyncConfig, DynamicSamplingConfig, EngineConfig, RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.teachers import teachers_of
from rlhf_cli.config.train import (
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    OptimConfig,
    TrackingConfig,
    ZeroStage,
)
from rlhf_cli.errors import listed

NEVER_ONLINE = frozenset(
    {
        "reward.prm_aggregation",
        "rollout.repetition_penalty",
        "rollout.seed",
        "optim.learning_rate",
        "batch.max_steps",
        "batch.eval_steps",
        "batch.stop_eval_loss",
        "model.keep_dropout",
        "reference.ref_pretrain",
        "reference.precompute_ref_log_probs",
        "episodes.turns",
    }
)
"""Settings unsupported by all online commands."""


class OnlineConfig(CommandConfig):
    """Settings of a command that trains on sampled responses. Each command lists unsupported settings."""

    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data openai/gsm8k:main --reward_funcs gsm8k "
        "--output runs/gsm8k --rollout_batch_size 128 --n_samples_per_prompt 8 --max_new_tokens 512 --max_len 1024 "
        "--train_batch_size 128 --actor_learning_rate 1e-6"
    )
    roles: ClassVar[Mapping[str, Role]] = ROLES
    """Possible roles of the command."""
    needs_reward: ClassVar[str] = ""
    """Why the command needs a reward even with a teacher; empty if it can train with only a teacher."""

    model: ModelConfig
    adapter: LoraConfig = LoraConfig()
    prompts: PromptConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    reward: RewardConfig = RewardConfig()
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    teacher: TeacherConfig = TeacherConfig()
    policy: PolicyConfig = PolicyConfig()
    reference: OnlineReferenceConfig = OnlineReferenceConfig()
    critic: CriticConfig = CriticConfig()
    reward_ranks: RewardRanksConfig = RewardRanksConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optim: OptimConfig = OptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @property
    def estimator(self) -> str:
        """The command's row in the table of estimators."""
        name = COMMANDS[self.command].estimator
        assert name, f"set the estimator of {self.command} in command_table.py"
        return name

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        rates = defaults_of_adapter(given, cls.model_fields["optim"].default, cls.model_fields["critic"].default)
        return rates | defaults_of_loss(given) | defaults_of_roles(given)

    @property
    def kl_terms(self) -> dict[str, KLTerm]:
        """KL penalties by role, for frozen policies with a model and a coefficient above 0."""
        terms = {}
        for name, role in self.roles.items():
            # Without `pretrain`, the role starts from the policy. Commands without its group have no coefficient.
            is_present = not role.pretrain or self.setting(role.pretrain) is not None
            if is_present and (coef := self.setting(role.kl_coef)):
                terms[name] = KLTerm(coef, self.setting(role.kl_estimator) or "k3")
        return terms

    def deepspeed_of(self, role: str) -> DeepSpeedConfig:
        """Return the DeepSpeed settings of a role: its own where they are set, otherwise the common ones."""
        common = self.deepspeed
        stage: ZeroStage = self.setting(self.deepspeed_name(role, "zero_stage"))
        size: int = self.setting(self.deepspeed_name(role, "sequence_parallel_size"))
        own: dict[str, object] = {"zero_stage": stage, "sequence_parallel_size": size}
        if role not in self.trained_roles:
            # ref_offload applies at any stage, because frozen weights are not partitioned otherwise.
            # Several whole teachers take turns on the GPU.
            takes_turns = role == "teacher" and stage != 3 and bool(self.other_teachers)
            own["param_offload"] = self.reference.ref_offload or takes_turns or (common.param_offload and stage == 3)
            own["tensor_parallel_size"] = 1  # only trained models are split
        return common.model_copy(update=own)

    def deepspeed_name(self, role: str, name: str) -> str:
        """Return the DeepSpeed setting that applies to a role: its own if given, otherwise the common one."""
        own = f"{role}_{name}"
        return name if self.setting(own) is None else own

    @property
    def partitions_weights(self) -> bool:
        """Whether any role uses ZeRO-3."""
        # All possible roles: missing ones have the common settings.
        return any(self.deepspeed_of(role).zero_stage == 3 for role in self.roles)

    @property
    def shares_sequences(self) -> bool:
        """Whether any role uses sequence parallelism."""
        return max(self.sequence_sizes) > 1

    @property
    def sequence_sizes(self) -> set[int]:
        """Sequence parallel sizes of all possible roles."""
        return {self.deepspeed_of(role).sequence_parallel_size for role in self.roles}

    def shape(self, role: str) -> tuple[int, int]:
        """Return (nodes, ranks per node) of a role, 1 by default."""
        return self.setting(f"{role}_num_nodes") or 1, self.setting(f"{role}_num_gpus_per_node") or 1

    def num_ranks(self, role: str) -> int:
        """Return the number of ranks of a role."""
        nodes, ranks = self.shape(role)
        return nodes * ranks

    def layout_settings(self, roles: Iterable[str]) -> LayoutSettings:
        """Return the settings that determine the layout of these roles."""
        possible, engine, placement, reward = self.roles.values(), self.engine, self.placement, self.reward
        # Dynamic sampling needs scores while engines generate, so the judge cannot wait for their GPUs.
        judges = reward.judge_num_engines or (1 if self.dynamic_sampling else None)
        sizes = [f"{role}_{name}" for role in self.roles for name in ("num_nodes", "num_gpus_per_node")]
        return LayoutSettings(
            shapes={role: self.shape(role) for role in roles},
            pairs=tuple((role.partner, role.name) for role in possible if role.switch and self.setting(role.switch)),
            together=placement.colocate_all_models,
            num_engines=engine.vllm_num_engines,
            engine_size=engine.vllm_tensor_parallel_size,
            judge=(judges, reward.judge_tensor_parallel_size) if reward.starts_judge else None,
            models_sleep=placement.deepspeed_enable_sleep,
            engines_sleep=engine.vllm_enable_sleep,
            is_open=engine.vllm_num_engines is None and all(self.setting(name) is None for name in sizes),
        )

    def with_layout(self, layout: LayoutSettings) -> Self:
        """Return the settings with the values that `fill_layout` has chosen."""
        values: dict[str, object] = {
            "colocate_all_models": layout.together,
            "vllm_num_engines": layout.num_engines,
            "vllm_tensor_parallel_size": layout.engine_size,
            "deepspeed_enable_sleep": layout.models_sleep,
            "vllm_enable_sleep": layout.engines_sleep,
        }
        values |= {self.roles[role].switch: True for _, role in layout.pairs}
        # Given sizes stay as they are, with None for a size of 1.
        if self.layout_settings(()).is_open and not layout.is_open:
            for role, (nodes, ranks) in layout.shapes.items():
                values |= {f"{role}_num_nodes": nodes, f"{role}_num_gpus_per_node": ranks}
        return self.updated(values)

    def host_of(self, role: str) -> str:
        """Return the role with the ranks that load this role's model: the role itself unless hosted."""
        return self.roles[role].host or role

    @property
    def hosted_roles(self) -> tuple[str, ...]:
        """Roles without separate ranks."""
        return tuple(name for name, role in self.roles.items() if role.host)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles that are trained."""
        return tuple(name for name, role in self.roles.items() if role.is_trained)

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """Dynamic sampling settings; None if disabled."""
        return self.dynamic if self.dynamic.dynamic_filtering else None

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher reads the responses."""
        return "teacher" in self.hosted_roles or self.teacher.teacher_pretrain is not None

    @property
    def other_teachers(self) -> tuple[str, ...]:
        """Teachers of single sources, besides `teacher_pretrain`."""
        by_source = self.setting("teacher_by_source")
        return () if by_source is None else teachers_of(self.setting("teacher_pretrain"), by_source)[1:]

    @property
    def distils_alone(self) -> bool:
        """Whether the policy trains with a teacher and no reward."""
        return self.teacher.teacher_pretrain is not None and not self.reward.has_weight

    @model_validator(mode="after")
    def _check_reward_or_teacher(self) -> Self:
        if not self.has_teacher and not self.reward.is_given:
            raise ValueError(
                f"no reward: set --reward_funcs ({', '.join(REWARDS)}), --reward_func FILE.py, "
                "--reward_pretrain MODEL, --remote_rm_url URL, --judge MODEL_OR_URL or --teacher_pretrain MODEL"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher_context(self) -> Self:
        if self.prompts.teacher_context_key is not None and not self.has_teacher:
            raise ValueError("teacher_context_key requires a teacher: set --teacher_pretrain")
        return self

    @property
    def plays_episodes(self) -> bool:
        """Whether responses are multi-turn episodes."""
        return self.episodes.plays_episodes

    @model_validator(mode="after")
    def _check_correct_responses(self) -> Self:
        if self.policy.correct_nll_coef and not self.reward.has_verifier:
            raise ValueError(
                "correct_nll_coef trains on responses that a verifier finds correct: set one in --reward_funcs, or "
                "--correct_nll_coef 0"
            )
        return self

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _check_scoring(self) -> Self:
        shaping = self.reward.changed("reward_clip_range", "overlong_buffer_len", "stop_properly_penalty_coef")
        given = self.evaluation.changed("eval_dataset") or shaping
        if given and not self.reward.is_given:
            raise ValueError(f"{given} applies to scores: set a reward in addition to the teacher")
        return self

    @model_validator(mode="after")
    def _check_best_metric_has_verifier(self) -> Self:
        key = self.evaluation.best_metric_key
        if key is not None and key != "eval/reward" and not self.reward.has_verifier:
            raise ValueError(f"best_metric_key {key} requires a verifier in --reward_funcs; or use eval/reward")
        return self

    @model_validator(mode="after")
    def _check_teacher_only(self) -> Self:
        if not self.distils_alone:
            return self
        policy = self.policy
        if policy.init_kl_coef > 0 and not policy.use_kl_loss:
            raise ValueError(
                "init_kl_coef is a penalty on the reward, but only the teacher is used: set --use_kl_loss with "
                "--kl_estimator k3, or --init_kl_coef 0"
            )
        if self.reward.prm_pretrain is not None:
            raise ValueError("prm_pretrain adds step rewards to other rewards, but only the teacher is used")
        if self.dynamic.dynamic_filtering:
            raise ValueError("dynamic_filtering selects prompts by reward, but only the teacher is used")
        if self.needs_reward:
            names = (name for name in POLICY_GRADIENT if not COMMANDS[name].config_class.needs_reward)
            alone = f"rlhf {listed(names)} can train with only a teacher"
            raise ValueError(f"{self.needs_reward}, but only the teacher is used: {alone}")
        return self
