"""A game by turns: take one to three stones from a heap, in turn with an opponent. Whoever takes the last one wins.

Rows have `stones`, the size of the heap. The opponent plays at random, by the seed of the episode.
"""

import random
import re

MOST = 3


class Environment:
    def reset(self, stones: int, seed: int, **row: object) -> str:
        """Begin a game and return its first words, which stand behind the prompt."""
        self.stones, self.rng = int(stones), random.Random(seed)
        return f" There are {self.stones} stones."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take the last number in the text, then let the opponent move. Another move than one to three loses."""
        numbers = re.findall(r"\d+", text)
        taken = int(numbers[-1]) if numbers else 0
        if not 1 <= taken <= min(MOST, self.stones):
            return f"{taken} stones cannot be taken. You lose.", 0.0, True
        self.stones -= taken
        if self.stones == 0:
            return "You took the last stone. You win.", 1.0, True
        answer = self.rng.randint(1, min(MOST, self.stones))
        self.stones -= answer
        if self.stones == 0:
            return f"I take {answer}, the last stone. You lose.", 0.0, True
        return f"I take {answer}. There are {self.stones} stones.", 0.0, False
