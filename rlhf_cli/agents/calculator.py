"""Calculator tool for the quickstart. An episode ends when the model replies without a tool call."""

import re

# Bounded digits and no eval: the model writes this text.
_TERMS = re.compile(r"\d{1,12}(\+\d{1,12})*")


class Environment:
    """A stateless episode. The verifier computes the reward from the last answer."""

    def reset(self) -> None:
        """Begin an episode. Parameters would receive columns from the prompt's row."""

    def calculate(self, terms: str) -> str:
        """Add whole numbers.

        Args:
            terms: the numbers with + between them.
        """
        if _TERMS.fullmatch(terms) is None:
            return "Error: write numbers with + between them, as in 12+34"
        return str(sum(map(int, terms.split("+"))))
