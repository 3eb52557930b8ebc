"""Converts character spans to token spans for byte-level tokenizers, using only token lengths.

Such tokenizers split UTF-8 text and drop nothing, so the lengths of preceding tokens determine a token's start. The
library's offsets support any tokenizer but take a sixth of the tokenization time.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from rlhf_cli.data.templates.turn_spans import Span

_UNKNOWN = -(2**40)
"""Marks tokens whose length depends on the text: no sum with it equals a text length."""


class TokenBytes:
    """Number of bytes per token of a byte-level tokenizer."""

    def __init__(self, vocabulary: dict[str, int], added: dict[int, AddedToken]) -> None:
        self._lengths = [_UNKNOWN] * (max(vocabulary.values(), default=-1) + 1)
        for token, number in vocabulary.items():
            self._lengths[number] = len(token)  # one character per byte
        for number, special in added.items():
            # Such tokens take neighboring white space with them, so their length varies.
            whole = not (special.lstrip or special.rstrip or special.normalized)
            self._lengths[number] = len(special.content.encode()) if whole else _UNKNOWN

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenBytes | None":
        """Return token lengths if the tokenizer keeps all bytes except for Unicode normalization; else None."""
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            return None
        # Other normalizers change lengths even for normalized text.
        if tokenizer.normalizer is not None and not isinstance(tokenizer.normalizer, normalizers.NFC):
            return None
        return cls(tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder())

    def spans(self, ids: Sequence[int], text: str, spans: Sequence[Span]) -> list[Span] | None:
        """Convert character spans to token spans; None if a span starts within a token, or lengths do not match the
        text.
        """
        # NFC changes the text before tokenization, so positions would not match.
        if not unicodedata.is_normalized("NFC", text):
            return None
        ends = list(accumulate(map(self._lengths.__getitem__, ids), initial=0))
        # A different total means that the tokenizer has changed the text.
        if ends[-1] != _num_bytes(text, len(text)):
            return None
        found = []
        for start, stop in spans:
            begin = _num_bytes(text, start)
            first = bisect_left(ends, begin)
            if ends[first] != begin:
                return None
            found.append((first, bisect_left(ends, _num_bytes(text, stop))))
        return found


def _num_bytes(text: str, place: int) -> int:
    return place if text.isascii() else len(text[:place].encode())
