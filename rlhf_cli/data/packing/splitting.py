"""Splits micro-batches that are too large for the memory."""

from collections.abc import Sequence
from typing import TypeVar

_Member = TypeVar("_Member")


def split_members(members: Sequence[_Member], tokens: Sequence[int], *, max_tokens: int | None) -> list[list[_Member]]:
    """Split the members of a micro-batch, in order, into parts of at most `max_tokens`.

    A longer member is a part of its own. Without members, returns one empty part, the idle micro-batch.

    Args:
        tokens: tokens of each member.
        max_tokens: None to keep the micro-batch.

    Example: members of 4, 3, 2 and 9 tokens with `max_tokens=6` are split into [4], [3, 2] and [9].
    """
    parts: list[list[_Member]] = [[]]
    room = max_tokens
    for member, size in zip(members, tokens, strict=True):
        if max_tokens is not None and room is not None:
            if parts[-1] and size > room:
                parts.append([])
                room = max_tokens
            room -= size
        parts[-1].append(member)
    return parts
