"""Length rewards, computed from the token count and, for some, the verifier's verdict. Pure functions."""

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
    """Cosine length reward: interpolates from the short value at 0 tokens to the long value at `max_len` and above.

    Correct and wrong answers use separate value pairs. Source: arXiv 2502.03373.
    """
    short, long = (correct_short, correct_long) if correct else (wrong_short, wrong_long)
    share = min(1.0, request.num_tokens / max_len)
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


def soft_overlong(request: ScoreRequest, correct: bool | None, *, max_len: int, buffer: int, factor: float) -> float:
    """Soft overlong penalty: 0 up to `max_len - buffer` tokens, then linear down to `-factor` at `max_len` and above.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    beyond = request.num_tokens - (max_len - buffer)
    return -factor * min(max(beyond, 0), buffer) / buffer


def length(requests: Sequence[ScoreRequest], corrects: Sequence[bool | None]) -> list[float]:
    """Length reward relative to the group: `0.5 - (len - min) / (max - min)`, capped at 0 for wrong answers.

    If all responses have the same length, the reward is 0. Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    shortest = min(request.num_tokens for request in requests)
    spread = max(request.num_tokens for request in requests) - shortest
    if spread == 0:
        return [0.0] * len(requests)
    values = [0.5 - (request.num_tokens - shortest) / spread for request in requests]
    return [value if correct else min(0.0, value) for value, correct in zip(values, corrects, strict=True)]
