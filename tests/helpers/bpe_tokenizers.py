"""Byte-level BPE tokenizers with chosen merges and end tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + 'END' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def bpe(*words: str, end: str = "<|im_end|>", special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and of all beginnings of the words, which end turns with `end`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    merges = []
    for word in words:
        for size in range(1, len(word)):
            pair = (word[:size], word[size])
            if pair not in merges:
                merges.append(pair)
                vocabulary.setdefault(word[: size + 1], len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = TEMPLATE.replace("END", end)
    return tokenizer
