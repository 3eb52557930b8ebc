"""Token ids of responses to text.

A model may have more embeddings than its tokenizer has tokens, and sample one of the others: no text belongs to it.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of tokens, without ids that the tokenizer does not have."""
    known = list(token_ids)
    if not tokenizer.is_fast:  # the fast ones skip such ids themselves, others fail
        size = len(tokenizer)
        known = [token for token in known if token < size]
    return str(tokenizer.decode(known, skip_special_tokens=skip_special_tokens))
