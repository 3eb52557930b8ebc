"""Text from tokens as they come, in whole characters.

A character may be spread over several tokens, and a tokenizer may write a token differently at the start of a text.
"""

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.decoding import text_of

HALF = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that are no character, or not yet."""


class TextStream:
    """The text of a response, piece by piece; special tokens have none.

    Each piece is decoded with the tokens of the piece before it, and without these: the difference is its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that the token completes, "" within a character."""
        self._held.append(token)
        text = self._text_of_held()
        return "" if text.endswith(HALF) else self._given(text)

    def rest(self) -> str:
        """Return the text of tokens that completed no character, at the end of the response."""
        return self._given(self._text_of_held())

    def _given(self, text: str) -> str:
        self._before, self._held = self._held or self._before, []
        return text

    def _text_of_held(self) -> str:
        before = self._decoded(self._before)
        return self._decoded(self._before + self._held)[len(before) :]

    def _decoded(self, token_ids: list[int]) -> str:
        return text_of(self._tokenizer, token_ids, skip_special_tokens=True)
