"""Rewards for the length of a response in tokens, some by whether its answer is right. Pure functions."""

import math
from collections.abc import Sequence

from rlhf_cli.rewards.records import ScoreRequest


def cosine(
    request: ScoreRequest,
    correct: bool | None,
    *,
    max_len: int,
    correct_short: float,
    correct_long: float,
    wrong_short: float,
    wrong_long: float,
) -> float:
    """Return the short value at 0 tokens, the long value from `max_len` on, half a cosine between (arXiv 2502.03373).

    Right and wrong answers have values of their own.
    """
    short, long = (correct_short, correct_long) if correct else (wrong_short, wrong_long)
    share = min(1.0, request.num_tokens / max_len)
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


def soft_overlong(request: ScoreRequest, correct: bool | None, *, max_len: int, buffer: int, factor: float) -> float:
    """Return 0 up to `max_len - buffer` tokens, then in a line down to `-factor` at `max_len` and above (DAPO, arXiv
    2503.14476, equation 13).
    """
    beyond = request.num_tokens - (max_len - buffer)
    return -factor * min(max(beyond, 0), buffer) / buffer


def length(requests: Sequence[ScoreRequest], corrects: Sequence[bool | None]) -> list[float]:
    """Reward a response that is shorter than the others to its prompt: `0.5 - (len - min) / (max - min)` for right
    answers and no more than 0 for wrong ones; 0 where all are equally long (Kimi k1.5, arXiv 2501.12599, section
    2.3.3).
    """
    shortest = min(request.num_tokens for request in requests)
    spread = max(request.num_tokens for request in requests) - shortest
    if spread == 0:
        return [0.0] * len(requests)
    values = [0.5 - (request.num_tokens - shortest) / spread for request in requests]
    return [value if correct else min(0.0, value) for value, correct in zip(values, corrects, strict=True)]
