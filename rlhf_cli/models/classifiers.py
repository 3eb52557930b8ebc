"""Recognize models with a sequence score, and choose their padding token.

reward_model.py checks whether such a model matches a policy.
"""

import copy

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import UsageError

CLASSIFIER = "ForSequenceClassification"
"""Class name suffix of sequence classifiers."""
_TOKEN_CLASSIFIER = "ForTokenClassification"
"""Class name suffix of TRL process reward models, with one logit each for wrong and right."""
_TOKEN_CLASSES = (_TOKEN_CLASSIFIER, "ForProcessRewardModel")
"""Class name suffixes of models with more than one logit per step; the second is Qwen2.5-Math-PRM."""
_NEW_PADDING = "<|pad|>"
"""Padding token to add if the tokenizer has no unused special token but the model has an unused embedding."""


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether the configuration is a sequence classifier."""
    return any(kind.endswith(CLASSIFIER) for kind in config.architectures or [])


def refuse_several_labels(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError for a sequence classifier without exactly one label; models without a head get one."""
    if is_classifier(config) and config.num_labels != 1:
        raise UsageError(f"{what} has {config.num_labels} labels, but a reward model has one")


def refuse_token_classes(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError for a process reward model with token classes, because loading would discard its head."""
    kind = next((kind for kind in config.architectures or [] if kind.endswith(_TOKEN_CLASSES)), None)
    if kind is not None:
        raise UsageError(
            f"{what} is {kind} with {config.num_labels} logits per step, but one is needed here: train a model with "
            f"`rlhf prm`; only --prm_pretrain also reads {_TOKEN_CLASSIFIER} with 2 logits"
        )


def is_token_classifier(config: PretrainedConfig) -> bool:
    """Return whether the configuration is a token classifier with two classes."""
    return config.num_labels == 2 and any(kind.endswith(_TOKEN_CLASSIFIER) for kind in config.architectures or [])


def refuse_classifier(config: PretrainedConfig, what: str) -> None:
    """Raise UsageError for a sequence or token classifier in place of a language model.

    With tied embeddings it would load without an error, because the LM head is not missing.
    """
    if any(kind.endswith((CLASSIFIER, *_TOKEN_CLASSES)) for kind in config.architectures or []):
        raise UsageError(f"{what} is {' '.join(config.architectures)}, which returns scores: use a language model")


def padding_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> str | None:
    """Return a special token to pad with, or None: one that never ends a response and has an embedding.

    The tokenizer's padding token is preferred. Tokens that appear in the chat template are excluded, since they may end
    a turn.
    """
    text = config.get_text_config()
    # Some models, such as Llama 3, have more than one end token.
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    written = str(tokenizer.chat_template)
    free = [
        token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number < text.vocab_size
        if number not in (tokenizer.eos_token_id, *ends) and token.content not in written
    ]
    # Prefer the padding token, then names with "pad" (Llama 3 finetune_right_pad_id), then reserved tokens.
    if free:
        return min(free, key=lambda name: (name != tokenizer.pad_token, "pad" not in name, "reserved" not in name))
    return _NEW_PADDING if len(tokenizer) < text.vocab_size else None


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer to save with the model. A classifier and its tokenizer get the same padding token, or none.

    transformers reads the score at the last token that is not the padding token in config.json; without one it accepts
    only batches of one row. The score is at the end of the turn, so an end-of-turn token must not be the padding token.
    """
    if not type(model).__name__.endswith(CLASSIFIER):
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padding_token(tokenizer, model.config)
    if padded.pad_token is not None:
        # Assigning pad_token alone does not add a new token to the vocabulary.
        padded.add_special_tokens({"pad_token": padded.pad_token})
    model.config.get_text_config().pad_token_id = padded.pad_token_id
    return padded
