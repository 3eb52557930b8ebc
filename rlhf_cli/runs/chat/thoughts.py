"""Which parts of an answer are a thought, in pieces of text as they come."""

from rlhf_cli.data.templates.turn_spans import THOUGHT_END, THOUGHT_START


class ThoughtMarks:
    """Cuts the pieces of an answer at the tags of thoughts; tags belong to the thought.

    A tag may be spread over several pieces, so the start of one is held back until the next piece shows what it is.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._held = ""

    def add(self, piece: str) -> list[tuple[str, bool]]:
        """Return the parts of the text that are known now, each with whether it is a thought."""
        text, parts = self._held + piece, []
        while (place := text.find(self._tag)) >= 0:
            if self._is_open:
                place += len(THOUGHT_END)
            parts.append((text[:place], self._is_open))
            text, self._is_open = text[place:], not self._is_open
        kept = len(text) - self._begun_tag(text)
        self._held = text[kept:]
        return [(part, is_thought) for part, is_thought in (*parts, (text[:kept], self._is_open)) if part]

    def rest(self) -> list[tuple[str, bool]]:
        """Return the part that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return [(text, self._is_open)] if text else []

    @property
    def _tag(self) -> str:
        """The tag that ends the present kind of text."""
        return THOUGHT_END if self._is_open else THOUGHT_START

    def _begun_tag(self, text: str) -> int:
        """Return the characters at the end of the text with which the tag may begin."""
        return max((size for size in range(1, len(self._tag)) if text.endswith(self._tag[:size])), default=0)
