"""The settings of `rlhf gkd`."""

from pydantic import model_validator

from rlhf_cli.config.commands.online import OwnResponsesConfig
from rlhf_cli.config.distillation import FixedRowsConfig, MixtureConfig
from rlhf_cli.config.online import ActorOptimConfig
from rlhf_cli.config.rollout import RolloutConfig


class GKDConfig(OwnResponsesConfig):
    """Settings of `rlhf gkd`."""

    distillation: MixtureConfig
    rows: FixedRowsConfig = FixedRowsConfig()
    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128)
    optim: ActorOptimConfig = ActorOptimConfig(actor_learning_rate=5e-6)

    @property
    def teacher_pretrain(self) -> str:
        """The teacher."""
        return self.distillation.teacher_pretrain

    @property
    def hosted_roles(self) -> tuple[str, ...]:
        """The teacher lives in the actor's ranks: its distributions are too large to travel."""
        return ("teacher",)

    @model_validator(mode="after")
    def _fixed_rows_have_a_share(self) -> "GKDConfig":
        given = self.rows.changed(*type(self.rows).model_fields)
        if given and self.distillation.lmbda == 1.0:
            raise ValueError(f"{given} is about responses of the data, which have no share at lmbda 1")
        given = self.prompts.changed("prompt_template", "format_prompt")
        if self.distillation.lmbda < 1.0 and given:
            raise ValueError(
                f"{given} makes prompts alone, and lmbda below 1 reads responses of the data too: give a chat "
                "template or input_template, or --lmbda 1"
            )
        return self

    @model_validator(mode="after")
    def _a_split_is_of_the_given_rows(self) -> "GKDConfig":
        given = self.rows.changed("dataset_probs", "dataset_split")
        if given and self.rows.dataset is None:
            raise ValueError(f"{given} is about --dataset, which is not given: rows are those of prompt_data")
        return self
