"""Solution steps: joined to text, and located in text or response tokens.

A step ends after its separator, the last step at the end of the text. A separator is a string such as a line break.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def joined_steps(steps: Sequence[str], separator: str) -> tuple[str, list[int]]:
    """Join the steps with separators. Returns the text, and each step's end."""
    text, ends = "", []
    for number, step in enumerate(steps, start=1):
        # The last step ends with the text instead of a separator.
        text += step + (separator if number < len(steps) else "")
        ends.append(len(text))
    return text, ends


def step_ends(text: str, separator: str) -> list[int]:
    """Return the end of each step; the last one is the end of the text.

    Blank pieces between separators belong to the previous step, at the start of the text to the next step. Blank text
    has no steps.
    """
    pieces = text.split(separator)
    ends: list[int] = []
    place = 0
    for number, piece in enumerate(pieces, start=1):
        place += len(piece) + (len(separator) if number < len(pieces) else 0)
        if piece.strip():
            ends.append(place)
        # Blank pieces belong to the step before them.
        elif ends:
            ends[-1] = place
    return ends


def token_step_ends(token_ids: Sequence[int], separator: str, decode: Decode, *, closing: frozenset[int]) -> list[int]:
    """Return each step's end in tokens: a step's last token is the first one that completes it.

    The last step ends with the response. Tokens are decoded, not retokenized, so that the model reads the sampled
    tokens. `decode` must keep special tokens. Trailing `closing` tokens (end of sequence, end of turn) are not a
    separate step. A response without text is a single step.
    """
    kept_ids = without_closing(token_ids, closing)
    text = decode(kept_ids)
    ends: list[int] = []
    for end in step_ends(text, separator)[:-1]:
        ends.append(_num_tokens(kept_ids, text[:end], decode, least=ends[-1] if ends else 0))
    # Two steps may end in the same token, which then counts once.
    return list(dict.fromkeys([*ends, len(token_ids)])) if token_ids else []


def without_closing(token_ids: Sequence[int], closing: frozenset[int]) -> Sequence[int]:
    """Return the tokens before trailing closing tokens."""
    num_kept = len(token_ids)
    while num_kept and token_ids[num_kept - 1] in closing:
        num_kept -= 1
    return token_ids[:num_kept]


def _num_tokens(token_ids: Sequence[int], beginning: str, decode: Decode, *, least: int) -> int:
    """Return the minimum number of tokens with text that starts with `beginning`."""

    def has_it(num_tokens: int) -> bool:
        return decode(token_ids[:num_tokens]).startswith(beginning)

    # The text grows with the tokens, so bisection needs few decodings.
    return bisect_left(range(len(token_ids)), True, lo=least, key=has_it)
