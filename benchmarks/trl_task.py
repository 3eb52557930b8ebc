"""Reward and environment for the comparisons with TRL, with the interfaces of both tools.

`rlhf --reward_func` and `--environment` load this file; trl_run.py imports it.
"""

PLACES = ("bridge", "castle", "forest", "garden", "harbour", "island", "market", "mill", "river", "station", "tower")
STEPS = 3


def share_of_vowels(text: str) -> float:
    """Return the fraction of vowels in a text, which an untrained model can learn, unlike solving problems."""
    return sum(character in "aeiou" for character in text.lower()) / max(1, len(text))


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> list[float]:
    """Reward for `rlhf --reward_func`."""
    return [share_of_vowels(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]


def trl_reward(completions: list[str], **columns: object) -> list[float]:
    """Reward for GRPOTrainer."""
    return [share_of_vowels(completion) for completion in completions]


def next_place(place: str) -> str:
    """Return the next place on the trail."""
    return PLACES[(5 * PLACES.index(place) + 3) % len(PLACES)]


class Trail:
    """Environment in which the model looks up the next place three times and then names the last one."""

    def reset(self, start: str, **row: object) -> None:
        """Start at a place."""
        self._expected, self._found = start, 0

    def look(self, place: str) -> str:
        """Look for the next place.

        Args:
            place: the place where you are.

        Returns:
            The next place.
        """
        if place not in PLACES:
            return "There is no such place."
        self._found += place == self._expected
        self._expected = next_place(place)
        return f"Next is the {self._expected}."

    def get_reward(self) -> float:
        """Return the fraction of correct lookups."""
        return self._found / STEPS
