"""Rewards for how a response is written, whatever its answer is. Pure functions, linear in its length."""

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
_FORMAT = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)
_STEP = re.compile(r"Step \d+:|^\d+\.|^[ \t]*[-*] |First,|Second,|Next,|Finally,", re.MULTILINE)
_ENOUGH_STEPS = 3


def has_format(response: str) -> float:
    """Return 1 if the response is `<think>..</think><answer>..</answer>` and nothing else but white space around the
    tags, each tag once; else 0 (DeepSeek-R1, arXiv 2501.12948).
    """
    return float(_FORMAT.fullmatch(response) is not None)


def tag_count(response: str) -> float:
    """Return a quarter for each of the four tags that is there exactly once."""
    return sum(response.count(tag) == 1 for tag in TAGS) / len(TAGS)


def reasoning_steps(response: str) -> float:
    """Return `min(1, n / 3)` for n marks of a step: `Step 1:`, `First,`, `Second,`, `Next,`, `Finally,`, and at the
    beginning of a line `1.`, `- ` or `* `.
    """
    return min(1.0, len(_STEP.findall(response)) / _ENOUGH_STEPS)


def repetition_penalty(response: str, *, n: int, max_penalty: float) -> float:
    """Return `max_penalty` times the share of n-grams of words that were there before, case ignored; 0 below n words
    (arXiv 2502.03373).
    """
    words = response.lower().split()
    total = len(words) - n + 1
    if total < 1:
        return 0.0
    unique = len({tuple(words[start : start + n]) for start in range(total)})
    return max_penalty * (1 - unique / total)
