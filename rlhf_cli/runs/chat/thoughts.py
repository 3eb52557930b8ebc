"""Detects reasoning in streamed answer text."""

from rlhf_cli.data.templates.turn_spans import THOUGHT_END, THOUGHT_START


class ThoughtMarks:
    """Splits a streamed answer at reasoning tags. Tags belong to the reasoning.

    A tag may span several pieces, so a partial tag is held back until the next piece completes or rules it out.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._held = ""

    def add(self, piece: str) -> list[tuple[str, bool]]:
        """Return the text parts known so far, each with whether it is reasoning."""
        text, parts = self._held + piece, []
        while (place := text.find(self._tag)) >= 0:
            # The closing tag is part of the reasoning, the opening tag starts it.
            if self._is_open:
                place += len(THOUGHT_END)
            parts.append((text[:place], self._is_open))
            text, self._is_open = text[place:], not self._is_open
        kept = len(text) - self._begun_tag(text)
        self._held = text[kept:]
        return [(part, is_thought) for part, is_thought in (*parts, (text[:kept], self._is_open)) if part]

    def rest(self) -> list[tuple[str, bool]]:
        """Return text held back at the end of the answer."""
        text, self._held = self._held, ""
        return [(text, self._is_open)] if text else []

    @property
    def _tag(self) -> str:
        """Tag that ends the current kind of text."""
        return THOUGHT_END if self._is_open else THOUGHT_START

    def _begun_tag(self, text: str) -> int:
        """Return the number of trailing characters that may begin the tag."""
        return max((size for size in range(1, len(self._tag)) if text.endswith(self._tag[:size])), default=0)
