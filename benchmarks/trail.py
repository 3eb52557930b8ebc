"""The environment of episodes_vs_trl.py, a file that both programs take as it is: a trail of places.

A player asks for the next place three times, and then names the last one.
"""

PLACES = ("bridge", "castle", "forest", "garden", "harbour", "island", "market", "mill", "river", "station", "tower")
STEPS = 3


def next_place(place: str) -> str:
    """Return the place behind this one."""
    return PLACES[(5 * PLACES.index(place) + 3) % len(PLACES)]


class Trail:
    """The places that a player has asked for."""

    def reset(self, start: str, **row: object) -> None:
        """Begin at a place."""
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
        """Return the share of the steps that went along the trail."""
        return self._found / STEPS
