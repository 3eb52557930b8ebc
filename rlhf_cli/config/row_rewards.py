"""Verifiers by data source, for the reward `by_row`."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from rlhf_cli.config.rewards import REWARDS, read_call, row_of

_BY_ROW = "by_row"
"""Reward that selects a verifier per row."""

DATA_SOURCE = "data_source"
"""Source column in verl rows."""

# Patterns cover the years and subsets in source names.
_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo*": "math",
    "aime*": "math",
    "numina_*": "math",
    "train-math-*": "math",
    "hiyouga/geometry3k": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "train-code-*": "code",
    "livecodebench*": "code",
    "reasoning_gym/*": "reasoning_gym",
}
"""Sources in verl, DAPO, PRIME and Skywork-OR1 data and of reasoning-gym, with their verifiers."""


def verifier_of(source: str, own: Mapping[str, str]) -> str | None:
    """Return a source's verifier in reward_funcs notation; None if it has none.

    `own` entries precede built-in ones, and exact names precede patterns. A source may also be a verifier name.
    """
    # The user's entries come first, also if a source has the name of a reward.
    if source in REWARDS and source not in own:
        return source if _is_verifier(source) else None
    # Exact names first, because a pattern may match them too.
    for table in (own, _SOURCES):
        pattern = source if source in table else next((name for name in table if fnmatchcase(source, name)), None)
        if pattern is not None:
            return table[pattern]
    return None


def _is_verifier(name: str) -> bool:
    """Return whether a reward can verify rows."""
    return row_of(name).kind == "verifier" and name != _BY_ROW


def fault_of_sources(own: Mapping[str, object]) -> str | None:
    """Return the error in a source-to-verifier mapping, or None."""
    for source, text in own.items():
        try:
            call = read_call(str(text))
        except ValueError as error:
            return f"{source}: {error}"
        if not _is_verifier(call.target or call.name):
            names = ", ".join(name for name in REWARDS if _is_verifier(name))
            return f"{source}: {call.name} is no verifier of a row; these are: {names}"
    return None
