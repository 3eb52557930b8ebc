"""Decodes response token IDs.

A model may have more embeddings than its tokenizer has tokens, and sample an ID without text.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Decode token IDs, skipping IDs that the tokenizer does not have."""
    known = list(token_ids)
    if not tokenizer.is_fast:  # fast tokenizers skip unknown IDs, slow ones fail
        # `len` includes added tokens, unlike `vocab_size`.
        size = len(tokenizer)
        known = [token for token in known if token < size]
    return str(tokenizer.decode(known, skip_special_tokens=skip_special_tokens))
