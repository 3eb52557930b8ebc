"""The reward of grpo_vs_trl.py in both programs' forms: how much of a response are vowels.

An untrained model never solves a problem, so that right answers would teach it nothing; vowels it writes by chance, and
can learn to write more of.
"""

from typing import Any


def share_of_vowels(text: str) -> float:
    """The part of a text's characters that are vowels, from 0 to 1."""
    return sum(character in "aeiou" for character in text.lower()) / max(1, len(text))


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> list[float]:
    """For `rlhf --reward_func`."""
    return [share_of_vowels(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]


def trl_reward(completions: list[str], **columns: Any) -> list[float]:
    """For GRPOTrainer."""
    return [share_of_vowels(completion) for completion in completions]
