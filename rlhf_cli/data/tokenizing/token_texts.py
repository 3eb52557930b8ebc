"""Bytes of tokens, to compare tokenizations of a text by different tokenizers."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from rlhf_cli.errors import UsageError

END = b"\xff<end>\xff"
"""Stands for any token that ends a response. No UTF-8 text contains these bytes."""
_PROBES = ("It's 12,345 + x = y;\n\tdef f(a):  return a", "naïve 你好 🙂")
_SPACE = "\u2581"
_NO_TEXT = re.compile("([\udc80-\udcff])")


class TokenTexts:
    """Texts of a tokenizer's tokens in bytes, by ID.

    Args:
        end_ids: tokens that end a response, the usual one first.
        num_rows: tokens that the model can predict; a tokenizer may have more.

    Raises UsageError for a tokenizer that changes text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], *, num_rows: int, what: str) -> None:
        if not tokenizer.is_fast:
            raise UsageError(f"{what}: its tokenizer has no tokenizer.json, which --teacher_tokenizer own requires")
        self._backend = tokenizer.backend_tokenizer
        self.end_ids = tuple(number for number in dict.fromkeys(end_ids) if number < num_rows)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        read = _read_byte_level if isinstance(self._backend.decoder, decoders.ByteLevel) else _read_pieces
        self.texts = [b""] * min(max(vocabulary.values()) + 1, num_rows)
        for token, number in vocabulary.items():
            # Such tokens have no text, so they are never compared.
            if number >= num_rows:
                continue
            self.texts[number] = token.encode() if number in added else read(token)
        self.end_texts = {number: self.texts[number] for number in self.end_ids}
        self.special = frozenset(number for number, token in added.items() if token.special)
        for number in self.end_ids:
            self.texts[number] = END
        self._prefix = self._added_prefix(what)

    def names(self, *, keeps_ends: bool) -> list[bytes]:
        """Return the text of each token by ID. Tokens that end a response have `END` unless `keeps_ends` is set."""
        kept = self.end_texts if keeps_ends else {}
        return [kept.get(number, text) for number, text in enumerate(self.texts)]

    def of(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token. Tokens without text have none."""
        return [self.texts[number] if number < len(self.texts) else b"" for number in ids]

    def have_text(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each token has text, bool. Rows of the model's head without a token have none."""
        return np.array([bool(text) for text in self.of(ids.tolist())], dtype=bool)

    def encoded(self, text: str) -> list[int]:
        """Tokenize text that follows other text."""
        if not self._prefix:
            return self._ids(text)
        # Behind a line break, the tokenizer adds no space before the text.
        ids = self._ids("\n" + text)
        place, joined = 0, b""
        while joined != self._prefix + b"\n" and place < len(ids):
            joined += self.of(ids[place : place + 1])[0]
            place += 1
        return ids[place:] if joined == self._prefix + b"\n" else self._ids(text)

    def encoded_bytes(self, text: bytes) -> list[int]:
        """Tokenize bytes that follow other text. Bytes that are not UTF-8 become tokens of single bytes; without such
        tokens, replacement characters, after which no position equals the original.
        """
        ids = []
        # The handler marks each of these bytes with a character that valid text does not contain.
        for part in _NO_TEXT.split(text.decode(errors="surrogateescape")):
            raw = part.encode(errors="surrogateescape")
            if not _NO_TEXT.fullmatch(part):
                ids += self.encoded(part) if part else []
            elif (number := self._single_bytes.get(raw)) is not None:
                ids.append(number)
            else:
                ids += self.encoded(raw.decode(errors="replace"))
        return ids

    @cached_property
    def _single_bytes(self) -> dict[bytes, int]:
        return {text: number for number, text in reversed([*enumerate(self.texts)]) if len(text) == 1}

    def first_tokens(self, texts: Sequence[str]) -> list[int | None]:
        """Return the first token of each text; None for an empty text."""
        if self._prefix:
            return [next(iter(self.encoded(text)), None) for text in texts]
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [next(iter(encoding.ids), None) for encoding in encodings]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _added_prefix(self, what: str) -> bytes:
        """Return the bytes that the tokenizer adds before a text. Raises UsageError if it changes other bytes."""
        prefixes = set()
        for probe in _PROBES:
            joined = b"".join(self.of(self._ids(probe)))
            if joined.removeprefix(b" ") != probe.encode():
                raise UsageError(
                    f"{what}: its tokenizer changes text ({probe!r} becomes {joined.decode(errors='replace')!r}), so "
                    "that positions in it cannot be compared by --teacher_tokenizer own"
                )
            prefixes.add(joined[: len(joined) - len(probe.encode())])
        return max(prefixes)


def _read_byte_level(token: str) -> bytes:
    # Added tokens may have other characters.
    return bytes(_BYTES[character] for character in token) if all(map(_BYTES.__contains__, token)) else token.encode()


def _read_pieces(token: str) -> bytes:
    """Return the bytes of a SentencePiece token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the bytes by their characters in byte-level vocabularies: printable ones are themselves, others follow
    from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
