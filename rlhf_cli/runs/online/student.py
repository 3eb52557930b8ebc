"""Parts specific to `rlhf gkd`: the hosted teachers and the fixed responses."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_cli.backends.roles.settings import HostedTeachers
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.distillation import NOT_OF_THE_LOSS
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.sequence_parallel.checks import can_share_prompts
from rlhf_cli.runs.online.models import OnlineModels
from rlhf_cli.runs.run_identity import supported_identity
from rlhf_cli.runs.teachers import token_events
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline.distill import DistillObjective, TeacherPreparation
from rlhf_cli.trainers.online.distilling import Mixture


@dataclass(frozen=True)
class StudentData:
    """Mixture of sampled and fixed responses, with facts for the run summary and checkpoint identity."""

    mixture: Mixture
    facts: dict[str, str]
    identity: dict[str, object]


def load_student_data(config: GKDConfig, models: OnlineModels, *, num_prompts: int) -> StudentData:
    """Load the mixture of sampled and fixed responses, with equal size per iteration.

    Raises:
        UsageError: rows are unusable.
    """
    distillation, rollout = config.distillation, config.rollout
    size = min(rollout.rollout_batch_size, num_prompts) * rollout.n_samples_per_prompt
    identity = supported_identity(config, "distillation", besides=NOT_OF_THE_LOSS)
    # Without fixed responses, rows need not be readable.
    if distillation.lmbda == 1.0:
        return StudentData(Mixture(1.0, (), size, config.batch.seed), {}, identity)
    from rlhf_cli.runs.offline.task import load_taught_items  # imports DeepSpeed, which other drivers do not need

    teachers, tokens = models.teachers, models.teacher_tokens
    items = load_taught_items(config, rows_config(config), models.policy, teachers, tokens).data
    data = items.data
    of_teachers = "" if items.assigned is None else f"; teachers: {items.assigned.summary}"
    return StudentData(
        Mixture(distillation.lmbda, items.sequences, size, config.batch.seed),
        {"Fixed responses": data.report.summary + of_teachers},
        identity | {"contents of the fixed rows": data.fingerprint()},
    )


def rows_config(config: GKDConfig) -> DataConfig:
    """Return the data settings for fixed responses: a separate dataset, or the dataset of the prompts."""
    prompts, rows = config.prompts, config.rows
    common = {"input_key": prompts.input_key, "max_len": prompts.max_len}
    own = {name: getattr(rows, name) for name in type(rows).model_fields} | {"invalid_rows": prompts.invalid_rows}
    if rows.dataset is None:
        # A dataset of prompts and responses serves both purposes.
        data_format = "prompt_response" if prompts.data_format == "prompt" else prompts.data_format
        own |= {
            "dataset": prompts.prompt_data,
            "dataset_probs": prompts.prompt_data_probs,
            "dataset_split": prompts.prompt_split,
            "data_format": data_format,
            "max_samples": prompts.max_samples,
        }
    return DataConfig(**common | own)


def hosted_teachers(config: GKDConfig, models: OnlineModels) -> HostedTeachers:
    """Return the settings of the hosted teachers and objective."""
    distillation = config.distillation
    settings = DivergenceSettings(distillation.beta, config.rollout.temperature, distillation.teacher_top_k)
    deepspeed = config.deepspeed_of("teacher")
    offload = deepspeed.param_offload or distillation.teacher_offload
    return HostedTeachers(
        tuple(teacher.source.model_copy(update={"compile_model": False}) for teacher in models.teachers),
        deepspeed.model_copy(update={"param_offload": offload}),
        TeacherPreparation,
        DistillObjective(settings),
        tuple(map(token_events, models.teacher_tokens)),
    )


def shares_prompts(config: GKDConfig, teachers: Sequence[ModelPlan]) -> bool:
    """Return whether packs may contain a shared prompt once; student and teachers read the same packs."""
    settings = config.deepspeed_of("teacher")
    return config.batch.share_prompts and all(
        can_share_prompts(teacher.attention, settings, teacher.layers) for teacher in teachers
    )
