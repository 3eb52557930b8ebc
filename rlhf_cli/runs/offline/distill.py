"""Task definition for `rlhf distill`: data, student, teacher and objective."""

from rlhf_cli.backends.training import distributed_env
from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.config.distillation import NOT_OF_THE_LOSS
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.teachers import teachers_of
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.requirements import check_loadable, packed_attention
from rlhf_cli.models.reward_model import find_language_model
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel
from rlhf_cli.models.student import StudentModel
from rlhf_cli.runs.offline.task import OfflineTask, ReferenceHooks, load_taught_items, offline_model
from rlhf_cli.runs.pictured_roles import check_role_pictures
from rlhf_cli.runs.run_identity import model_identity, supported_identity, teachers_identity
from rlhf_cli.runs.teachers import teacher_tokens, teachers_facts, token_events
from rlhf_cli.runs.trained_model import ModelPlan, find_companion
from rlhf_cli.trainers.offline.distill import DistillObjective, TeacherPreparation


def distill_task(config: DistillConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, models or data conflict."""
    distillation = config.distillation
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    deepspeed, sources = teacher_deepspeed(config), _teacher_sources(config, model)
    own = distillation.teacher_tokenizer == "own"
    teachers = [_checked_teacher(_flag(config, source), source, deepspeed, model, own=own) for source in sources]
    for source, teacher in zip(sources, teachers, strict=True):
        check_role_pictures(
            model.found,
            teacher.found,
            f"--{_flag(config, source)} {source.pretrain!r}",
            pictures=config.pictures,
            trust_remote_code=source.trust_remote_code,
        )
    tokens = teacher_tokens(config.template, model, teachers) if own else ()
    events = list(map(token_events, tokens)) if own else [None] * len(sources)
    items = load_taught_items(config, config.data, model, teachers, tokens)
    assigned = items.data.assigned
    settings = DivergenceSettings(distillation.beta, distillation.temperature, distillation.teacher_top_k)

    def teacher_hooks() -> ReferenceHooks:
        # Built later on all ranks: loading a teacher needs the process group.
        frozen = [FrozenTeacher(source, deepspeed, shared) for source, shared in zip(sources, events, strict=True)]
        return ReferenceHooks(prepare=TeacherPreparation(frozen))

    return OfflineTask(
        command=config.command,
        objective=DistillObjective(settings, distillation.kd_coef),
        items=items,
        summary=items.data.data.report.summary,
        model=model,
        load=load_causal_lm,
        wrap=StudentModel,
        identity=lambda: {
            **supported_identity(config, "distillation", besides=NOT_OF_THE_LOSS),
            **model_identity("teacher", teachers[0].found),
            **teachers_identity(config, teachers),
        },
        notices=tuple(f"{name}: {fact}" for name, fact in teachers_facts(tokens, assigned).items()),
        begin=lambda items, share: (items, teacher_hooks()),
    )


def _teacher_sources(config: DistillConfig, model: ModelPlan) -> list[ModelConfig]:
    """Return the model settings of all teachers: the student's dtype and attention kernel."""
    # The teacher's template is not used, since it reads tokens of the student's template.
    changes = {"tokenizer_chat_template": None, "compile_model": False, "gradient_checkpointing": False}
    settings = config.distillation
    return [
        model.base.model_copy(update={**changes, "pretrain": pretrain})
        for pretrain in teachers_of(settings.teacher_pretrain, settings.teacher_by_source)
    ]


def _flag(config: DistillConfig, source: ModelConfig) -> str:
    """Return the setting that names a teacher."""
    return "teacher_pretrain" if source.pretrain == config.distillation.teacher_pretrain else "teacher_by_source"


def teacher_deepspeed(config: DistillConfig) -> DeepSpeedConfig:
    """Return the teacher's DeepSpeed settings, with its ZeRO stage and offloading."""
    own = config.distillation.teacher_zero_stage
    stage = config.deepspeed.zero_stage if own is None else own
    settings = config.distillation
    teachers = teachers_of(settings.teacher_pretrain, settings.teacher_by_source)
    # ZeRO-3 offloading moves partitions, which only exist at that stage. Several whole teachers take turns on the GPU.
    offload = settings.teacher_offload or (config.deepspeed.param_offload if stage == 3 else len(teachers) > 1)
    return config.deepspeed.model_copy(update={"zero_stage": stage, "param_offload": offload})


def _checked_teacher(
    flag: str, source: ModelConfig, deepspeed: DeepSpeedConfig, model: ModelPlan, *, own: bool
) -> ModelPlan:
    """Find a teacher. Raises UsageError if it cannot be loaded, or its token IDs differ from the student's and it does
    not read its `own` tokens.
    """
    if own:
        found, tokenizer = find_language_model(flag, source)
    else:
        found, tokenizer = find_companion(flag, source, model), model.tokenizer
    _, num_ranks = distributed_env.rank_and_world_size()
    try:
        check_loadable(source, found.architecture, in_4bit=False, partitioned=deepspeed.zero_stage == 3)
        attention = packed_attention(source, found.architecture)
        check_sequence_parallel(
            found.architecture,
            deepspeed,
            num_ranks=num_ranks,
            attention=attention,
            trust_remote_code=source.trust_remote_code,
        )
    except UsageError as error:
        raise UsageError(f"--{flag}: {error}") from error
    return ModelPlan(source, source, None, found, tokenizer)
