"""Models with a score for a whole sequence: how to recognize them, and their padding token.

reward_model.py checks that such a model fits a policy.
"""

import copy

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import UsageError

CLASSIFIER = "ForSequenceClassification"
"""End of the class names of models with a score for a whole sequence."""
TOKEN_CLASSIFIER = "ForTokenClassification"
"""End of the class names of TRL's process reward models, with a number for wrong and one for right."""
TOKEN_CLASSES = (TOKEN_CLASSIFIER, "ForProcessRewardModel")
"""Ends of the class names of models with several numbers for a step; the second is of Qwen2.5-Math-PRM."""
NEW_PADDING = "<|pad|>"
"""Padding token of a tokenizer that has none to spare, if the model has an embedding no token uses."""


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether the model of this configuration has a score for a whole sequence."""
    return any(kind.endswith(CLASSIFIER) for kind in config.architectures or [])


def refuse_several_labels(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError naming a classifier whose head is no reward model's; models without such a head get one."""
    if is_classifier(config) and config.num_labels != 1:
        raise UsageError(f"{what} has {config.num_labels} labels, and a reward model has one")


def refuse_token_classes(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError naming a process reward model with classes for each token: its head would be thrown away."""
    kind = next((kind for kind in config.architectures or [] if kind.endswith(TOKEN_CLASSES)), None)
    if kind is not None:
        raise UsageError(
            f"{what} is {kind} with {config.num_labels} numbers for a step, and one number is needed here: `rlhf prm` "
            f"trains such a model from a language model; --prm_pretrain also reads {TOKEN_CLASSIFIER} with 2 numbers"
        )


def is_token_classifier(config: PretrainedConfig) -> bool:
    """Return whether the model of this configuration has a number for each of two classes of each token."""
    return config.num_labels == 2 and any(kind.endswith(TOKEN_CLASSIFIER) for kind in config.architectures or [])


def refuse_classifier(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError for a classifier in place of a language model: with tied embeddings it would load as one.

    Classifiers of sequences and of tokens are refused alike.
    """
    if any(kind.endswith((CLASSIFIER, *TOKEN_CLASSES)) for kind in config.architectures or []):
        raise UsageError(f"{what} is {' '.join(config.architectures)}, which gives scores: give a language model")


def padding_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> str | None:
    """Return a special token that ends no response and that the model has an embedding of; None if there is none.

    It is the tokenizer's own padding token if that will do. A token that the chat template writes may end a turn.
    """
    text = config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    written = str(tokenizer.chat_template)
    free = [
        token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number < text.vocab_size
        if number not in (tokenizer.eos_token_id, *ends) and token.content not in written
    ]
    if free:  # Llama 3 has tokens called finetune_right_pad_id and reserved_special_token
        return min(free, key=lambda name: (name != tokenizer.pad_token, "pad" not in name, "reserved" not in name))
    return NEW_PADDING if len(tokenizer) < text.vocab_size else None


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer to save beside the model; a classifier and it get the same padding token, or neither has
    one.

    transformers reads the score of a row at its last token that is not the padding token of config.json, and without
    one takes single rows only. The score stands at the end of the turn, which must not be taken for padding.
    """
    if not type(model).__name__.endswith(CLASSIFIER):
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padding_token(tokenizer, model.config)
    if padded.pad_token is not None:
        padded.add_special_tokens({"pad_token": padded.pad_token})  # gives a new one an id
    model.config.get_text_config().pad_token_id = padded.pad_token_id
    return padded
