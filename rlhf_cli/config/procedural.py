"""Datasets of the package reasoning-gym: their names in the settings, and the instruction that goes with their reward.

They are generated, not read: `reasoning_gym:chain_sum?size=500&seed=1`. `data/reading/reasoning_gym.py` reads them.
"""

PREFIX = "reasoning_gym:"
"""Prefix of a dataset name that refers to the package."""

REWARD = "reasoning_gym"
"""Reward that scores an answer with the function of its dataset."""

FIXED_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of processes that generate problems: some datasets iterate over sets of text."""

BAD_NAME = 2
"""Exit status of such a process if the dataset's name or a parameter is wrong."""

INSTRUCTION = (
    "Think step by step. Then write the final answer between <answer> and </answer>, in the form that the question "
    "asks for, without explanations."
)
"""System prompt that asks for the tags from which the reward reads the answer."""


def is_procedural(name: str) -> bool:
    """Return whether a dataset name refers to a generated dataset."""
    return name.strip().startswith(PREFIX)


def all_procedural(spec: str) -> bool:
    """Return whether all names in `spec`, separated by commas, refer to generated datasets."""
    return all(map(is_procedural, spec.split(",")))
