"""`rlhf gkd`: distillation on the student's own responses."""

from pydantic import model_validator

from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.distillation import DistillationConfig, FixedRowsConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import ROLES, STUDENT_ROLES
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import SHAPING, STEP_REWARDS
from rlhf_cli.config.train import OptimConfig


class GKDConfig(OnlineConfig):
    """Distill a teacher on the student's own responses, mixed with a fraction of fixed responses (GKD)."""

    command = "gkd"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --teacher_pretrain Qwen/Qwen2.5-7B-Instruct "
        "--prompt_data openai/gsm8k:main --output runs/gkd --rollout_batch_size 128 --max_new_tokens 512 "
        "--max_len 1024 --train_batch_size 128 --actor_learning_rate 1e-6"
    )

    unsupported = (
        NEVER_ONLINE
        | STEP_REWARDS
        | SHAPING
        | {"distillation.temperature", "distillation.kd_coef", "rollout.prompt_sampling"}
        | {"episodes", "asynchronous", "dynamic", "teacher", "policy"}
        | {role.group for role in ROLES.values() if role.name not in STUDENT_ROLES}
    )
    roles = STUDENT_ROLES

    distillation: DistillationConfig
    rows: FixedRowsConfig = FixedRowsConfig()
    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128)
    # init_kl_coef 0 loads no reference.
    policy: PolicyConfig = PolicyConfig(init_kl_coef=0.0)
    optim: OptimConfig = OptimConfig(actor_learning_rate=5e-6)

    @property
    def estimator(self) -> str:
        """The row without advantages: the loss is a divergence."""
        return self.command

    @model_validator(mode="after")
    def _check_fixed_rows(self) -> "GKDConfig":
        given = self.rows.changed(*type(self.rows).model_fields)
        if given and self.distillation.lmbda == 1.0:
            raise ValueError(f"{given} applies to dataset responses, which are not used with lmbda 1")
        if self.distillation.lmbda < 1.0 and self.prompts.teacher_context_key is not None:
            raise ValueError(
                "teacher_context_key is for sampled responses, but lmbda below 1 also reads dataset responses: set "
                "--lmbda 1"
            )
        if self.shares_sequences and self.prompts.teacher_context_key is not None:
            raise ValueError(
                "teacher_context_key does not support sequence_parallel_size, because student and teacher would split "
                "different prompts: set --sequence_parallel_size 1"
            )
        if self.shares_sequences:
            self.distillation.check_whole_sequences()
        given = self.template.changed("prompt_template", "format_prompt")
        if self.distillation.lmbda < 1.0 and given:
            raise ValueError(
                f"{given} renders only prompts, but lmbda below 1 also reads dataset responses: use a chat template or "
                "input_template, or set --lmbda 1"
            )
        return self
