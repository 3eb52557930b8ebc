"""The teacher of a policy, found and held against the policy before any weight is read."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import refuse_classifier
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.requirements import check_trainable, packed_attention
from rlhf_cli.models.reward_model import require_same_tokens
from rlhf_cli.models.tokenizers import load_tokenizer


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
    teacher_pretrain: str, policy: ModelConfig, architecture: PretrainedConfig, tokenizer: object
) -> TeacherModel:
    """Return the teacher of the settings, loaded the way the policy is.

    Args:
        architecture: the policy's configuration.
        tokenizer: the policy's tokenizer.

    Raises UsageError if it is no whole language model, cannot read packs or reads other token ids than the policy.
    """
    changes = {"pretrain": teacher_pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    source = policy.model_copy(update=changes)
    try:
        found, own_tokenizer = find_model(source), load_tokenizer(source)
        check_trainable(found.architecture)
    except UsageError as error:
        raise UsageError(f"--teacher_pretrain: {error}") from error
    what = f"--teacher_pretrain {teacher_pretrain!r}"
    refuse_classifier(found.architecture, what)
    require_same_tokens(own_tokenizer, tokenizer, what)
    _require_all_embeddings(found.architecture, architecture, what)
    return TeacherModel(source, found)


def _require_all_embeddings(teacher: PretrainedConfig, policy: PretrainedConfig, what: str) -> None:
    """Raise UsageError if the policy could sample a token that the teacher has no embedding of."""
    own, sampled = (config.get_text_config().vocab_size for config in (teacher, policy))
    if own < sampled:
        raise UsageError(
            f"{what} has {own:,} embeddings and the policy {sampled:,}: it could not read every token that the policy "
            "may sample"
        )
