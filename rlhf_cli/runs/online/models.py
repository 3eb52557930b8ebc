"""Models for online commands: discovery and compatibility checks before weights are read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus
from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.backends.training.checkpoint_layout import continuation_notice
from rlhf_cli.backends.training.deepspeed_config import check_secondary_parts
from rlhf_cli.backends.weight_sync.adapter_push import check_adapter_push
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.roles import FROZEN_POLICY
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.classifiers import refuse_several_labels
from rlhf_cli.models.requirements import check_loadable, check_trainable
from rlhf_cli.models.reward_model import (
    TEACHER_FLAGS,
    RewardModelPlan,
    find_process_reward_model,
    find_reward_model,
    require_same_tokens,
)
from rlhf_cli.models.routing_replay import check_routing_replay
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel, check_whole_packs
from rlhf_cli.models.tensor_parallel import check_tensor_parallel
from rlhf_cli.models.vision.freezing import check_trained_parts
from rlhf_cli.runs.judge_model import JudgeModel, find_judge
from rlhf_cli.runs.pictured_roles import check_engine_pictures, check_role_pictures
from rlhf_cli.runs.run_directory import check_not_replaced
from rlhf_cli.runs.shared_sequences import sharing, splitting
from rlhf_cli.runs.teachers import teacher_tokens
from rlhf_cli.runs.trained_model import ModelPlan, find_frozen_policy, trained_model


@dataclass(frozen=True)
class OnlineModels:
    """The models of a run before weights are read.

    - `trained`, `frozen`: for roles with ranks, in the order of `ROLES`.
    - `hosted`: for roles that the actor's ranks load.
    - `other_teachers`: teachers of single sources, in the ranks of the teacher.
    - `judge`: a judge that the run starts.
    - `teacher_tokens`: tokens of all teachers if they have their own tokenizers; () if they read the policy's tokens.

    Example, `rlhf grpo` with a KL penalty: trained = {"actor": policy}, frozen = {"ref": policy}, hosted = {}.
    """

    trained: Mapping[str, ModelPlan]
    frozen: Mapping[str, ModelPlan | RewardModelPlan]
    hosted: Mapping[str, ModelPlan] = field(default_factory=dict)
    other_teachers: tuple[ModelPlan, ...] = ()
    judge: JudgeModel | None = None
    teacher_tokens: tuple[TeacherTokens, ...] = ()

    @property
    def by_role(self) -> dict[str, ModelPlan | RewardModelPlan]:
        """Models with ranks by role."""
        return {**self.trained, **self.frozen}

    @property
    def loaded(self) -> dict[str, ModelPlan | RewardModelPlan]:
        """All models by role."""
        return {**self.by_role, **self.hosted}

    @property
    def frozen_policies(self) -> dict[str, ModelPlan]:
        """Frozen language models by role, except the reference, which is the initial policy."""
        models = {**self.frozen, **self.hosted}.items()
        return {role: model for role, model in models if isinstance(model, ModelPlan) and role != "ref"}

    @property
    def policy(self) -> ModelPlan:
        """The actor's model."""
        return self.trained["actor"]

    @property
    def rates_of_adapters(self) -> tuple[str, ...]:
        """The settings of the learning rates that train an adapter."""
        return tuple(f"{role}_learning_rate" for role, model in self.trained.items() if model.plan)

    @property
    def critic(self) -> ModelPlan | None:
        """The critic's model, if any."""
        return self.trained.get("critic")

    @property
    def reward(self) -> RewardModelPlan | None:
        """The reward model, if any."""
        model = self.frozen.get("reward")
        return model if isinstance(model, RewardModelPlan) else None

    @property
    def teacher(self) -> ModelPlan | None:
        """The teacher, if any."""
        return self.frozen_policies.get("teacher")

    @property
    def teachers(self) -> tuple[ModelPlan, ...]:
        """All teachers, the one of rows without an entry in `teacher_by_source` first."""
        return () if self.teacher is None else (self.teacher, *self.other_teachers)

    @property
    def all_models(self) -> list[tuple[str, ModelPlan | RewardModelPlan]]:
        """All models with their roles."""
        return [*self.loaded.items(), *(("teacher", model) for model in self.other_teachers)]


def find_models(config: OnlineConfig, estimator: Estimator) -> OnlineModels:
    """Find the models for these settings.

    A separate reference exists only with a KL coefficient and without an adapter that can be disabled instead.

    Raises:
        UsageError: a model does not suit its role, or its token IDs differ.
    """
    policy = trained_model(config.model, config.adapter, seed=config.batch.seed)
    require_language_model(config.model, policy.architecture, policy.plan)
    check_trainable(policy.architecture, trust_remote_code=policy.base.trust_remote_code)
    check_trained_parts(policy.base, config.adapter, policy.architecture, is_adapted=policy.plan is not None)
    if policy.plan is not None and config.reference.ref_sync_steps:
        raise UsageError("ref_sync_steps requires full fine-tuning: with an adapter, the base model is the reference")
    trained = {"actor": policy}
    if estimator.critic:
        trained["critic"] = _critic(config, policy)
    frozen: dict[str, ModelPlan | RewardModelPlan] = {}
    # An adapter can be disabled instead of loading a second copy.
    if config.policy.init_kl_coef > 0 and policy.plan is None:
        frozen["ref"] = policy
    if (reward := _reward_model(config, policy)) is not None:
        frozen["reward"] = reward
    hosted: dict[str, ModelPlan] = {}

    def frozen_policy(flag: str, pretrain: str) -> ModelPlan:
        own = flag in TEACHER_FLAGS and config.setting("teacher_tokenizer") == "own"
        return find_frozen_policy(flag, pretrain, policy.base, policy.architecture, policy.tokenizer, own_tokenizer=own)

    for role in config.roles.values():
        pretrain = config.setting(role.pretrain) if role.rank == FROZEN_POLICY and role.pretrain else None
        if pretrain is not None:
            (hosted if role.host else frozen)[role.name] = frozen_policy(role.pretrain, pretrain)
    others = tuple(frozen_policy("teacher_by_source", pretrain) for pretrain in config.other_teachers)
    models = OnlineModels(trained, frozen, hosted, others, find_judge(config.reward, config.model))
    if config.setting("teacher_tokenizer") == "own":
        models = replace(models, teacher_tokens=teacher_tokens(config.template, policy, models.teachers))
    # Check the adapters' bases too, since --overwrite would remove them as well.
    bases = {model.base.pretrain for model in models.by_role.values() if isinstance(model, ModelPlan)}
    sources = {model.source.pretrain for _, model in models.all_models}
    sources |= {models.judge.source.pretrain} if models.judge else set()
    check_not_replaced(config.checkpoint, *sorted(bases | sources))
    return models


def _reward_model(config: OnlineConfig, policy: ModelPlan) -> RewardModelPlan | None:
    """Return the reward model of responses or steps, if any."""
    reward = config.reward
    if reward.prm_pretrain is not None:
        model = find_process_reward_model(reward.prm_pretrain, policy.base, policy.tokenizer)
        _check_room_for_separator(config, model)
        return model
    if reward.reward_pretrain is None:
        return None
    return find_reward_model(reward.reward_pretrain, policy.base, policy.tokenizer, normalize=reward.normalize_reward)


def _check_room_for_separator(config: OnlineConfig, model: RewardModelPlan) -> None:
    """Raise UsageError if a micro-batch cannot fit a separator after the longest sequence."""
    batch, longest = config.batch, config.prompts.max_len + len(model.last_separator)
    if batch.max_tokens * config.deepspeed_of("reward").sequence_parallel_size < longest:
        raise UsageError(
            f"--prm_pretrain appends a separator to the last step, so a sequence may have {longest} tokens: raise "
            f"train_max_tokens_per_gpu {batch.max_tokens}, or lower max_len {config.prompts.max_len}"
        )


def reward_model_fact(model: RewardModelPlan | None) -> dict[str, str]:
    """Return the summary line for the outcome or process reward model."""
    if model is None:
        return {}
    return {"Reward model" if model.separator is None else "Process reward model": model.source.pretrain}


def _critic(config: OnlineConfig, policy: ModelPlan) -> ModelPlan:
    """Return the critic's model: `critic_pretrain`, by default the policy, with a separate adapter in adapter runs."""
    pretrain = config.critic.critic_pretrain
    if pretrain is None:
        refuse_several_labels(policy.architecture, f"the critic by --pretrain {policy.source.pretrain!r}")
        return policy
    source = config.model.model_copy(update={"pretrain": pretrain, "tokenizer_chat_template": None})
    try:
        critic = trained_model(source, config.adapter, seed=config.batch.seed)
        check_trainable(critic.architecture, trust_remote_code=critic.base.trust_remote_code)
    except UsageError as error:
        raise UsageError(f"--critic_pretrain: {error}") from error
    what = f"--critic_pretrain {pretrain!r}"
    refuse_several_labels(critic.architecture, what)
    require_same_tokens(critic.tokenizer, policy.tokenizer, what)
    return critic


def idle_settings(config: OnlineConfig, roles: Sequence[str]) -> list[str]:
    """Return a notice for each missing role with settings.

    They are not errors, so that a command keeps working when the KL penalty is disabled or an adapter is added.
    """
    notices = []
    for name, role in config.roles.items():
        if role.is_trained or role.host or name in roles:
            continue
        # The first changed setting is enough for a notice.
        if given := config.changed(*role.rank_settings, *(["normalize_reward"] if name == "reward" else [])):
            notices.append(f"--{given} is ignored: {role.absent}")
    return notices


def truncation_notice(rollout: RolloutConfig) -> list[str]:
    """Return a notice if sampling is truncated but training log-probs are not."""
    given = rollout.changed("top_p", "top_k", "min_p")
    if given is None:
        return []
    return [
        f"--{given} {getattr(rollout, given):g} truncates only sampling: ratios, KL and gradients use the full "
        "distribution, in which sampled tokens have lower probability"
    ]


def check_ranks_together(config: OnlineConfig, models: OnlineModels) -> None:
    """Raise UsageError if ranks cannot share sequences or split layers as set."""
    check_shared_sequences(config, models)
    check_split_layers(config, models)


def check_shared_sequences(config: OnlineConfig, models: OnlineModels) -> None:
    """Raise UsageError if a role's ranks cannot share sequences as set."""
    policy = models.policy
    check_whole_packs(
        max(config.sequence_sizes),
        aux_loss_coef=config.optim.aux_loss_coef,
        compile_model=config.model.compile_model,
    )
    for role, model in models.all_models:
        check_sequence_parallel(
            model.found.architecture,
            config.deepspeed_of(role),
            num_ranks=config.num_ranks(config.host_of(role)),
            attention=(model if isinstance(model, ModelPlan) and role in models.frozen_policies else policy).attention,
            trust_remote_code=model.source.trust_remote_code,
            name=config.deepspeed_name(role, "sequence_parallel_size"),
        )


def check_split_layers(config: OnlineConfig, models: OnlineModels) -> None:
    """Raise UsageError if a trained role's ranks cannot split layers as set."""
    for role, model in models.trained.items():
        check_tensor_parallel(
            model.architecture,
            config.deepspeed_of(role),
            num_ranks=config.num_ranks(role),
            optim=config.optim,
            adapted=model.plan is not None,
            compile_model=config.model.compile_model,
        )
    if config.deepspeed.tensor_parallel_size == 1:
        return
    if config.optim.enable_ema:
        raise UsageError("enable_ema averages full weights: drop --tensor_parallel_size")
    if any(config.deepspeed_of(role).zero_stage == 3 for role in config.hosted_roles):
        raise UsageError(
            "--tensor_parallel_size: DeepSpeed cannot partition a hosted teacher when layers are split; set "
            "--teacher_zero_stage 2, which keeps the full teacher on each rank"
        )


def together(config: OnlineConfig, roles: Sequence[str]) -> list[str]:
    """Describe sequence parallelism, with the maximum sequence length per group size, and tensor parallelism."""
    by_size: dict[int, list[str]] = {}
    for role in roles:
        by_size.setdefault(config.deepspeed_of(role).sequence_parallel_size, []).append(role)
    return [
        text
        for _, names in sorted(by_size.items())
        for text in sharing(config.batch, config.deepspeed_of(names[0]), of=" + ".join(names))
    ] + splitting(config.deepspeed, of=" + ".join(role for role in roles if role in config.trained_roles))


def check_adapters(config: OnlineConfig, models: OnlineModels, *, backend: str) -> None:
    """Raise UsageError if an adapter is unsupported by the roles or engines as set."""
    check_4_bits(config, models)
    if config.adapter.lora_push == "adapter":
        check_adapter_push(models.policy.plan, backend=backend, sync_backend=config.engine.vllm_sync_backend)


def check_replayed(config: OnlineConfig, architecture: PretrainedConfig, *, backend: str) -> None:
    """Raise UsageError if the experts of rollout engines cannot be returned or replayed as set."""
    if not config.policy.rollout_routing_replay:
        return
    check_routing_replay(architecture)
    problems = (
        (config.model.compile_model, "compile_model would compile the routers: drop it"),
        (backend not in ("vllm", "transformers"), f"--rollout_backend {backend} does not return routed experts"),
        (
            backend == "vllm" and not may_have_gpus(),
            "vLLM returns routed experts only on a GPU: set --rollout_backend transformers",
        ),
        (
            backend == "vllm" and not config.engine.enable_prefix_caching,
            "vLLM returns routed experts only with prefix caching: drop --no_enable_prefix_caching",
        ),
    )
    for applies, problem in problems:
        if applies:
            raise UsageError(f"--rollout_routing_replay: {problem}")


def check_pictures(config: OnlineConfig, models: OnlineModels, *, backend: str) -> None:
    """Raise UsageError if the engines or another model cannot process the policy's images."""
    architecture = models.policy.architecture
    check_engine_pictures(architecture, backend=backend, pushes_adapter=config.adapter.lora_push == "adapter")
    flags = {role.name: role.pretrain for role in config.roles.values() if role.pretrain}
    if config.reward.prm_pretrain is not None:
        flags["reward"] = "prm_pretrain"
    for role, model in models.all_models:
        if role in flags:
            flag = "teacher_by_source" if model in models.other_teachers else flags[role]
            what = f"--{flag} {model.source.pretrain!r}"
            check_role_pictures(
                models.policy.found,
                model.found,
                what,
                pictures=config.pictures,
                trust_remote_code=config.model.trust_remote_code,
            )


def check_4_bits(config: OnlineConfig, models: OnlineModels) -> None:
    """Raise UsageError if 4-bit weights are requested but unsupported.

    With RAY_ADDRESS, the cluster may have GPUs and bitsandbytes even if this machine does not; the ranks check there.
    """
    for role, model in models.trained.items():
        if model.plan is None or not model.plan.in_4bit:
            continue
        if config.deepspeed_of(role).zero_stage == 3:
            stage = config.deepspeed_name(role, "zero_stage")
            raise UsageError(f"load_in_4bit does not go with --{stage} 3, which cannot partition 4-bit weights")
        if not os.environ.get("RAY_ADDRESS"):
            check_loadable(config.model, model.architecture, in_4bit=True, partitioned=False)


def check_stages(config: OnlineConfig, roles: Sequence[str]) -> None:
    """Raise UsageError if a role does not support its ZeRO stage, secondary partition or offloading."""
    # An option without any effect is an error, because offloading is set to save memory.
    if config.reference.ref_offload and set(roles) <= set(config.trained_roles):
        reasons = "; ".join(role.absent for role in config.roles.values() if not role.is_trained)
        raise UsageError(f"ref_offload: no model of this run is frozen; {reasons}")
    for role in (*roles, *config.hosted_roles):
        num_ranks = config.num_ranks(config.host_of(role))
        check_secondary_parts(config.deepspeed_of(role), num_ranks=num_ranks, role=role)
    for role in roles:
        if config.model.compile_model and config.deepspeed_of(role).zero_stage == 3:
            stage = config.deepspeed_name(role, "zero_stage")
            raise UsageError(f"compile_model does not go with --{stage} 3, which gathers weights between layers")


def layout_notices(resume: Checkpoint, config: OnlineConfig, models: OnlineModels) -> list[str]:
    """Return a notice for each trained role with states to repartition. Raises UsageError if that is impossible."""
    notices = []
    for role in models.trained:
        notices += continuation_notice(
            resume.path / role,
            what=role,
            zero_stage=config.deepspeed_of(role).zero_stage,
            num_ranks=config.num_ranks(role),
            tensor_parallel_size=config.deepspeed_of(role).tensor_parallel_size,
        )
    return notices
