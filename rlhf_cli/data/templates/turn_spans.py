"""Span of a turn in rendered text: pure functions on text, messages and turn markers.

Rendering is in the other modules of `templates`.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_cli.data.formats.conversations import Message, Span, ToolCall

_SPACE = re.compile(r"\s*")
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_THOUGHT_TAG = re.compile(r"(</?think>)")
"""Templates put reasoning on separate lines, regardless of the row's white space."""
THOUGHT_START, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """Markers around a turn: end tokens, and the assistant header."""

    ends: tuple[str, ...]
    header: str = ""

    def end_at(self, text: str, place: int) -> str | None:
        """Return the end of turn at `place`."""
        return next((end for end in self.ends if text.startswith(end, place)), None)

    def any_in(self, text: str) -> bool:
        """Return whether a turn ends in the text."""
        return any(end in text for end in self.ends)

    def skip_break(self, text: str, place: int) -> int:
        """Return the position after an end and header that split one turn, such as after gpt-oss reasoning."""
        end = self.end_at(text, place)
        # Only an end followed by a header continues the same turn.
        divided = end is not None and self.header and text.startswith(self.header, place + len(end))
        return place + len(end) + len(self.header) if end is not None and divided else place


@dataclass(frozen=True, slots=True)
class Said:
    """Expected content of an assistant turn: text pieces separated by white space, then calls.

    `thought` precedes them, in the template's markers.
    """

    parts: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    thought: str = ""

    @classmethod
    def by(cls, message: Message) -> "Said":
        """Return the message's full content."""
        return cls._of(message.content, message, thought=message.reasoning.strip())

    @classmethod
    def without_thought(cls, message: Message) -> "Said | None":
        """Return the content without reasoning, for templates that remove it; None without reasoning, or if nothing
        remains.
        """
        # The last closing tag: reasoning may mention the tag.
        _, tag, answer = message.content.rpartition(THOUGHT_END)
        has_thought = bool(tag or message.reasoning)
        return cls._of(answer, message) if has_thought and (answer.strip() or message.tool_calls) else None

    @classmethod
    def _of(cls, content: str, message: Message, thought: str = "") -> "Said":
        parts = (part.strip() for part in _THOUGHT_TAG.split(content))
        return cls(tuple(part for part in parts if part), message.tool_calls, thought)

    def behind(self, prompt: str) -> "Said":
        """Return the content that remains after a generation prompt, which may start the reasoning."""
        opened = self.parts[:1] == (THOUGHT_START,) and prompt.rstrip().endswith(THOUGHT_START)
        return replace(self, parts=self.parts[1:]) if opened else self

    @property
    def first(self) -> str:
        """First text; "" if there are only calls."""
        return self.thought or next(iter(self.parts), "")


def turn_at(text: str, start: int, said: Said, marks: TurnMarks) -> Span | None:
    """Return the span from `start` over content and end of turn; None if the text differs.

    Empty reasoning inserted before tool calls is part of the turn, because the model generates it.
    """
    if said.thought:
        return _turn_with_thought(text, start, said, marks)
    place = start
    # Qwen 3 writes an empty thought before calls, which the model also generates.
    if said.calls and (thought := EMPTY_THOUGHT.match(text, start)) and THOUGHT_END not in said.parts:
        place = thought.end()
    for part in said.parts:
        place = skip_space(text, place)
        if not text.startswith(part, place):
            return None
        place += len(part)
    if said.calls:
        place = marks.skip_break(text, place)
        # Calls have no fixed text, so the turn ends at its first end token.
        stop = min((found for end in marks.ends if (found := text.find(end, place)) >= 0), default=-1)
        if stop < 0 or missing_call(text[place:stop], said.calls) is not None:
            return None
        place = stop
    stop = skip_space(text, place)
    end = marks.end_at(text, stop)
    return None if end is None else (start, stop + len(end))


def _turn_with_thought(text: str, start: int, said: Said, marks: TurnMarks) -> Span | None:
    begin = text.find(said.thought, start)
    if begin < 0 or marks.any_in(text[start:begin]):
        return None
    place, answer = marks.skip_break(text, begin + len(said.thought)), replace(said, thought="")
    span = turn_from(text, place, answer, marks) if answer.first else turn_at(text, place, answer, marks)
    return None if span is None else (start, span[1])


def turn_from(text: str, floor: int, said: Said, marks: TurnMarks) -> Span | None:
    """Return the span of the first turn from `floor` with this content, without another end of turn before it."""
    begin = text.find(said.first, floor)
    while begin >= 0 and not marks.any_in(text[floor:begin]):
        span = turn_at(text, begin, said, marks)
        if span is not None:
            return span
        begin = text.find(said.first, begin + 1)
    return None


def missing_call(text: str, calls: Sequence[ToolCall]) -> ToolCall | None:
    """Return the first call that is missing in the text, judged by its name and all argument values in order."""
    place = 0
    for call in calls:
        named = text.find(call.name, place)
        if named < 0:
            return call
        place = named + len(call.name)
        ends = [_end_of(text, value, place) for value in _values(call.arguments)]
        if -1 in ends:
            return call
        place = max([place, *ends])
    return None


def place_after(messages: Sequence[Message], text: str, floor: int) -> int:
    """Return the end of user and tool text since the last assistant turn, at least `floor`."""
    # Only messages since the last turn limit the search.
    since = itertools.takewhile(lambda message: message.role != "assistant", reversed(messages))
    for message in reversed(list(since)):
        for piece in message.pieces if message.role != "system" else ():
            if piece.strip():
                floor = max(floor, _end_of(text, piece, floor))
    return floor


def left_out(messages: Sequence[Message], text: str, spans: Sequence[Span]) -> Message | None:
    """Return the first system, user or tool message that is missing at its position between assistant turns.

    Templates may move the system message. Without spans, as in a prompt, messages must appear in order.
    """
    place, following = 0, iter([*spans, (len(text), len(text))])
    begin, stop = next(following)
    for message in messages:
        if message.role == "assistant":
            if spans:
                place = stop
                begin, stop = next(following)
            continue
        # Templates move the system message, so search it anywhere.
        bounds = (0, None) if message.role == "system" else (place, begin)
        end = _end_of_pieces(text, message, *bounds)
        if end < 0:
            return message
        place = place if message.role == "system" else end
    return None


def _end_of_pieces(text: str, message: Message, place: int, stop: int | None) -> int:
    """Return the end of a message's text pieces, in order from `place`; -1 if one is missing."""
    for piece in message.pieces:
        if piece.strip():
            place = _end_of(text, piece, place, stop)
            if place < 0:
                return -1
    return place


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix in characters or tokens."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def skip_space(text: str, position: int) -> int:
    """Return the position of the first non-space character from `position`."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _values(arguments: object) -> Iterator[object]:
    """Yield keys, and values other than lists and objects."""
    if isinstance(arguments, dict):
        for key, value in arguments.items():
            yield key
            yield from _values(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from _values(value)
    else:
        yield arguments


def _end_of(text: str, value: object, place: int, stop: int | None = None) -> int:
    """Return the end of the first occurrence of a value from `place`, as text or JSON; -1 if it is not before
    `stop`.
    """
    # Templates write values as text, as JSON, or as JSON with escapes.
    for write in (_plain, _json, json.dumps):
        written = write(value)
        written = written[1:-1] if isinstance(value, str) and write is not _plain else written
        found = text.find(written, place, stop)
        if found >= 0:
            return found + len(written)
    return -1


def _plain(value: object) -> str:
    return str(value).strip()


def _json(value: object) -> str:
    return json.dumps(value.strip() if isinstance(value, str) else value, ensure_ascii=False)
