"""Positions and events that two tokenizers share, for distillation from a teacher with a tokenizer of its own.

Both models predict the next token at each byte where tokens of both start. Their predictions are compared as
distributions over events: tokens with equal bytes in both vocabularies. A token of only one vocabulary counts as the
first token that the other tokenizer makes of its text, which starts with the same bytes. This repeats until a token is
in both vocabularies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_cli.data.tokenizing.token_texts import END, TokenTexts


def shared_spans(own: Sequence[bytes], other: Sequence[bytes]) -> np.ndarray:
    """Return the spans of equal text that start with tokens of both, int64 `[n, 4]`: number of the first token here and
    there, and the tokens here and there up to the next byte where tokens of both start or end. These are 0 for a last
    span whose end is unknown, because the texts differ before the next such byte.

    Example: "a bc" as [b"a", b" b", b"c"] and [b"a", b" bc"] gives [[0, 0, 1, 1], [1, 1, 2, 1]].
    """
    common = _num_common(b"".join(own), b"".join(other))
    starts, places = _starts(own, common)
    others, other_places = _starts(other, common)
    shared, of_own, of_other = np.intersect1d(starts, others, assume_unique=True, return_indices=True)
    places = np.stack([places[of_own], other_places[of_other]], -1)
    # The last byte of the common text only ends a span. Before it, a start without a next one has no end.
    if shared[-1] < common:
        places = np.concatenate([places, places[-1:]])
    return np.concatenate([places[:-1], np.diff(places, axis=0)], -1)


def _num_common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size


def _starts(texts: Sequence[bytes], common: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct start bytes up to `common`, with the first token at each. The end counts as one more."""
    starts, places = np.unique(np.cumsum([0, *map(len, texts)]), return_index=True)
    return starts[starts <= common], places[starts <= common]


@dataclass(frozen=True)
class SharedEvents:
    """Events by token of two vocabularies, int64 `[V]` each; E, their number, for tokens without counterpart.

    - `tokens`: the student's token that names each event, int64 `[E]`.

    Example: vocabularies {"a", "b", "ab"} and {"a", "b"} have two events: "ab" counts as "a".
    """

    student: np.ndarray
    teacher: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, student: TokenTexts, teacher: TokenTexts) -> "SharedEvents":
        """Match two vocabularies. Special tokens count only as tokens with equal text. All tokens that end a response
        are one event, unless both vocabularies have the same.
        """
        keeps_ends = {*student.end_texts.values()} == {*teacher.end_texts.values()}
        names, others = (side.names(keeps_ends=keeps_ends) for side in (student, teacher))
        shared = _first_tokens(names).keys() & _first_tokens(others).keys()
        tokens = sorted(token for text, token in _first_tokens(names).items() if text in shared)
        events = {names[token]: event for event, token in enumerate(tokens)}
        parents = _parents(names, events, student, teacher) | _parents(others, events, teacher, student)
        of_student, of_teacher = (_events_of(texts, events, parents) for texts in (names, others))
        return cls(of_student, of_teacher, np.array(tokens, np.int64))


def _first_tokens(names: Sequence[bytes]) -> dict[bytes, int]:
    """Return the first token with each text."""
    found: dict[bytes, int] = {}
    for number, text in enumerate(names):
        if text:
            found.setdefault(text, number)
    return found


def _parents(
    names: Sequence[bytes], events: dict[bytes, int], own: TokenTexts, other: TokenTexts
) -> dict[bytes, bytes]:
    """Return the shorter text that each text of only one vocabulary counts as."""
    alone = {text for number, text in enumerate(names) if number not in own.special and text not in events}
    texts = {text: _decoded(text) for text in sorted(alone - {END, b""})}
    known = {text: decoded for text, decoded in texts.items() if decoded is not None}
    firsts = dict(zip(known, other.first_tokens(list(known.values())), strict=True))
    found = {}
    for text in texts:
        first = firsts.get(text)
        parent = b"" if first is None else other.of([first])[0]
        if not parent or len(parent) >= len(text) or not text.startswith(parent):
            # Bytes that are no whole characters, or that the other tokenizer cannot encode.
            parent = next((text[:end] for end in range(len(text) - 1, 0, -1) if text[:end] in events), b"")
        found[text] = parent
    return found


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _events_of(names: Sequence[bytes], events: dict[bytes, int], parents: dict[bytes, bytes]) -> np.ndarray:
    found = np.full(len(names), len(events), np.int64)
    for number, name in enumerate(names):
        text = name
        # Each parent is shorter than its text.
        while text and text not in events:
            text = parents.get(text, b"")
        if text:
            found[number] = events[text]
    return found
