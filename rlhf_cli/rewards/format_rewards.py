"""Format rewards, independent of the answer. Pure functions in linear time."""

import re

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# Any text without one of the four tags, so that each tag occurs exactly once.
_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
_FORMAT = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)
_STEP = re.compile(r"Step \d+:|^\d+\.|^[ \t]*[-*] |First,|Second,|Next,|Finally,", re.MULTILINE)
_ENOUGH_STEPS = 3


def has_format(response: str) -> float:
    """Return 1 if the response is exactly `<think>..</think><answer>..</answer>`, otherwise 0.

    Whitespace around the tags is allowed; each tag must occur once. Source: DeepSeek-R1, arXiv 2501.12948.
    """
    return float(_FORMAT.fullmatch(response) is not None)


def tag_count(response: str) -> float:
    """Return 0.25 for each tag that occurs exactly once."""
    return sum(response.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def reasoning_steps(response: str) -> float:
    """Return `min(1, n / 3)` for n step markers.

    Step markers are `Step 1:`, `First,`, `Second,`, `Next,` and `Finally,`, and at a line start `1.`, `- ` and `* `.
    """
    return min(1.0, len(_STEP.findall(response)) / _ENOUGH_STEPS)


def repetition_penalty(response: str, *, n: int, max_penalty: float) -> float:
    """Return `max_penalty` times the fraction of repeated word n-grams, ignoring case; 0 for fewer than n words.

    Source: arXiv 2502.03373.
    """
    words = response.lower().split()
    total = len(words) - n + 1
    if total < 1:
        return 0.0
    unique = len({tuple(words[start : start + n]) for start in range(total)})
    return max_penalty * (1 - unique / total)
