"""Find the teacher model and check it against the policy before loading weights."""

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.requirements import check_trainable, packed_attention
from rlhf_cli.models.reward_model import find_reader


@dataclass(frozen=True)
class TeacherModel:
    """A frozen language model that reads the policy's token IDs, before its weights are loaded."""

    source: ModelConfig
    found: FoundModel

    @property
    def attention(self) -> str:
        """Attention kernel for the teacher."""
        return packed_attention(self.source, self.found.architecture)


def find_teacher(
    teacher_pretrain: str, policy: ModelConfig, architecture: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> TeacherModel:
    """Find the configured teacher, with the loading settings of the policy.

    Args:
        architecture: policy configuration.
        tokenizer: policy tokenizer.

    Raises UsageError if it is not a complete language model, does not support packs or has a different vocabulary than
    the policy.
    """
    changes = {"pretrain": teacher_pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    source = policy.model_copy(update=changes)
    found = find_reader("teacher_pretrain", source, tokenizer)
    try:
        # The teacher is never trained, but it reads the same packs.
        check_trainable(found.architecture)
    except UsageError as error:
        raise UsageError(f"--teacher_pretrain: {error}") from error
    _require_all_embeddings(found.architecture, architecture, f"--teacher_pretrain {teacher_pretrain!r}")
    return TeacherModel(source, found)


def _require_all_embeddings(teacher: PretrainedConfig, policy: PretrainedConfig, what: str) -> None:
    """Raise UsageError if the policy could sample a token without an embedding in the teacher."""
    # Compare embedding rows, not vocabularies: the policy may sample padding rows beyond the tokenizer's vocabulary.
    own, sampled = (config.get_text_config().vocab_size for config in (teacher, policy))
    if own < sampled:
        raise UsageError(
            f"{what} has {own:,} embeddings and the policy {sampled:,}: it cannot read every token that the policy may "
            "sample"
        )
