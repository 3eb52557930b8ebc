"""Which verifier judges the rows of a data source, for the reward `by_row`."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from rlhf_cli.config.rewards import REWARDS, read_call, row_of

BY_ROW = "by_row"
"""The reward that is each row's own verifier."""

DATA_SOURCE = "data_source"
"""The column in which verl's rows name their source."""

SOURCES = {
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
}
"""Names of sources in the data of verl, DAPO, PRIME and Skywork-OR1, with the verifier of each."""


def verifier_of(source: str, own: Mapping[str, str]) -> str | None:
    """Return the verifier of a source, as one writes it for reward_funcs; None if nothing names one.

    `own` mappings come before the built-in ones, and whole names before patterns. A source may also be the name of a
    verifier itself.
    """
    if source in REWARDS and source not in own:
        return source if is_verifier(source) else None
    for table in (own, SOURCES):
        pattern = source if source in table else next((name for name in table if fnmatchcase(source, name)), None)
        if pattern is not None:
            return table[pattern]
    return None


def is_verifier(name: str) -> bool:
    """Return whether a reward can judge a row."""
    return row_of(name).kind == "verifier" and name != BY_ROW


def fault_of_sources(own: Mapping[str, object]) -> str | None:
    """Return the fault of a mapping from sources to verifiers, None if there is none."""
    for source, text in own.items():
        try:
            call = read_call(str(text))
        except ValueError as error:
            return f"{source}: {error}"
        if not is_verifier(call.target or call.name):
            names = ", ".join(name for name in REWARDS if is_verifier(name))
            return f"{source}: {call.name} is no verifier of a row; these are: {names}"
    return None
