"""Streaming decoder that emits complete characters.

A character may span several tokens, and a token may decode differently at the start of a text.
"""

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.decoding import text_of

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Decoders emit this for invalid or incomplete bytes."""


class TextStream:
    """Streamed response text. Special tokens are removed.

    Each piece is decoded together with the previous piece's tokens; the text of the previous piece is then removed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Return the text completed by the token, "" within a character."""
        self._held.append(token)
        text = self._text_of_held()
        return "" if text.endswith(_HALF) else self._given(text)

    def rest(self) -> str:
        """Return the text of incomplete characters at the end of the response."""
        return self._given(self._text_of_held())

    def _given(self, text: str) -> str:
        self._before, self._held = self._held or self._before, []
        return text

    def _text_of_held(self) -> str:
        before = self._decoded(self._before)
        # Decode with the preceding tokens: tokenizers drop a space at the start of a text.
        return self._decoded(self._before + self._held)[len(before) :]

    def _decoded(self, token_ids: list[int]) -> str:
        return text_of(self._tokenizer, token_ids, skip_special_tokens=True)
