"""A calculator as the tool of a model. An episode ends when the model answers without a call."""

import re

TERMS = re.compile(r"\d{1,12}(\+\d{1,12})*")


class Environment:
    """One episode, which has nothing to remember: the reward is the verifier's, from the last answer."""

    def reset(self) -> None:
        """Begin an episode. Arguments would be columns of the prompt's row."""

    def calculate(self, terms: str) -> str:
        """Add whole numbers.

        Args:
            terms: the numbers with + between them.
        """
        if TERMS.fullmatch(terms) is None:
            return "Error: write numbers with + between them, as in 12+34"
        return str(sum(map(int, terms.split("+"))))
