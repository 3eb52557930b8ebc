"""Task definition for `rlhf distill`: data, student, teacher and objective."""

from rlhf_cli.backends.training import distributed_env
from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.config.distillation import NOT_OF_THE_LOSS
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.requirements import check_loadable, packed_attention
from rlhf_cli.models.sequence_parallel.checks import check_sequence_parallel
from rlhf_cli.models.student import StudentModel
from rlhf_cli.runs.offline.task import OfflineTask, ReferenceHooks, load_items, offline_model
from rlhf_cli.runs.pictured_roles import check_role_pictures
from rlhf_cli.runs.run_identity import model_identity, supported_identity
from rlhf_cli.runs.trained_model import ModelPlan, find_companion
from rlhf_cli.trainers.offline.distill import DistillObjective, TeacherPreparation
from rlhf_cli.trainers.offline.sft import unweighted_items


def distill_task(config: DistillConfig) -> OfflineTask:
    """Load the data and build the task. Raises UsageError if settings, models or data conflict."""
    distillation = config.distillation
    model = offline_model(config)
    require_language_model(config.model, model.architecture, model.plan)
    source, deepspeed = _teacher_source(config, model), teacher_deepspeed(config)
    teacher = _checked_teacher(source, deepspeed, model)
    check_role_pictures(
        model.found,
        teacher,
        f"--teacher_pretrain {source.pretrain!r}",
        pictures=config.pictures,
        trust_remote_code=source.trust_remote_code,
    )
    items = load_items(config, SEQUENCES, config.data, model, unweighted_items)
    settings = DivergenceSettings(distillation.beta, distillation.temperature, distillation.teacher_top_k)

    def teacher_hooks() -> ReferenceHooks:
        # Built later on all ranks: loading the teacher needs the process group.
        frozen = FrozenTeacher(source, deepspeed)
        return ReferenceHooks(prepare=TeacherPreparation(frozen.hidden_states, frozen.head))

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
            **model_identity("teacher", teacher),
        },
        begin=lambda items, share: (items, teacher_hooks()),
    )


def _teacher_source(config: DistillConfig, model: ModelPlan) -> ModelConfig:
    """Return the teacher's model settings: the student's dtype and attention kernel."""
    # The teacher's template is not used, since it reads tokens of the student's template.
    changes = {"pretrain": config.distillation.teacher_pretrain, "tokenizer_chat_template": None}
    return model.base.model_copy(update=changes | {"compile_model": False, "gradient_checkpointing": False})


def teacher_deepspeed(config: DistillConfig) -> DeepSpeedConfig:
    """Return the teacher's DeepSpeed settings, with its ZeRO stage and offloading."""
    own = config.distillation.teacher_zero_stage
    stage = config.deepspeed.zero_stage if own is None else own
    # ZeRO-3 offloading moves partitions, which only exist at that stage.
    offload = config.distillation.teacher_offload or (config.deepspeed.param_offload and stage == 3)
    return config.deepspeed.model_copy(update={"zero_stage": stage, "param_offload": offload})


def _checked_teacher(source: ModelConfig, deepspeed: DeepSpeedConfig, model: ModelPlan) -> FoundModel:
    """Find the teacher. Raises UsageError if it cannot be loaded, or its token IDs differ from the student's."""
    found = find_companion("teacher_pretrain", source, model)
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
        raise UsageError(f"--teacher_pretrain: {error}") from error
    return found
