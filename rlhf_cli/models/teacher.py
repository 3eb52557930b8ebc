"""The teacher of a policy, found and held against the policy before any weight is read."""

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.requirements import check_trainable, packed_attention
from rlhf_cli.models.reward_model import find_reader


@dataclass(frozen=True)
class TeacherModel:
    """A frozen language model that reads the policy's token ids, before its weights are loaded."""

    source: ModelConfig
    found: FoundModel

    @property
    def attention(self) -> str:
        """Name of the attention kernel it is going to run with."""
        return packed_attention(self.source, self.found.architecture)


def find_teacher(
    teacher_pretrain: str, policy: ModelConfig, architecture: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> TeacherModel:
    """Return the teacher of the settings, loaded the way the policy is.

    Args:
        architecture: the policy's configuration.
        tokenizer: the policy's tokenizer.

    Raises UsageError if it is no whole language model, cannot read packs or reads other token ids than the policy.
    """
    changes = {"pretrain": teacher_pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    source = policy.model_copy(update=changes)
    found = find_reader("teacher_pretrain", source, tokenizer)
    try:
        check_trainable(found.architecture)
    except UsageError as error:
        raise UsageError(f"--teacher_pretrain: {error}") from error
    _require_all_embeddings(found.architecture, architecture, f"--teacher_pretrain {teacher_pretrain!r}")
    return TeacherModel(source, found)


def _require_all_embeddings(teacher: PretrainedConfig, policy: PretrainedConfig, what: str) -> None:
    """Raise UsageError if the policy could sample a token that the teacher has no embedding of."""
    own, sampled = (config.get_text_config().vocab_size for config in (teacher, policy))
    if own < sampled:
        raise UsageError(
            f"{what} has {own:,} embeddings and the policy {sampled:,}: it could not read every token that the policy "
            "may sample"
        )
