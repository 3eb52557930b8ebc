"""Notations for a tool call's name and arguments, and how to parse them.

The notation is detected from the template's rendering of a known call. Markers around calls are in `tool_calls`.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.templates.turn_spans import Span, num_shared, skip_space

NAME = re.compile(r"[\w.:/-]+")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Values as written by Qwen 3 templates with tags."""


class CallFault(ValueError):
    """Reason why a call cannot be parsed; completes a sentence that starts with the call."""


class CallBody(Protocol):
    """A notation for name and arguments."""

    @property
    def start(self) -> str:
        """Regular expression for the start of a call, to distinguish it from other text."""
        ...

    def read(self, text: str, place: int) -> tuple[ToolCall, int]:
        """Parse the call at `place`. Returns the call and its end. Raises CallFault if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class _JsonBody:
    """A JSON object with name and arguments; `path` leads to it within outer objects."""

    path: tuple[str, ...]
    name_key: str
    arguments_key: str

    @property
    def start(self) -> str:
        # Either key may come first.
        keys = [self.path[0]] if self.path else [self.name_key, self.arguments_key]
        return r'\{\s*"(?:' + "|".join(map(re.escape, keys)) + r')"\s*:'

    def read(self, text: str, place: int) -> tuple[ToolCall, int]:
        value, end = json_at(text, place)
        for key in self.path:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            raise CallFault("is no JSON object with a name and arguments")
        name = value.get(self.name_key)
        if not isinstance(name, str) or not name.strip():
            raise CallFault(f'has no "{self.name_key}" that is a text')
        if self.arguments_key not in value:
            raise CallFault(f'of {name} has no "{self.arguments_key}"')
        return called(name, value[self.arguments_key]), end


@dataclass(frozen=True, slots=True)
class NamedJsonBody:
    """The name, a marker, and the arguments as a JSON object.

    Models vary the text before the marker's last control token, for example gpt-oss: `mark_end` is that token, or "".
    That text must not contain any of the `barred` markers of turns and calls.
    """

    mark: str
    mark_end: str
    barred: tuple[str, ...] = ()

    @property
    def start(self) -> str:
        return NAME.pattern + loose(self.mark)

    def read(self, text: str, place: int) -> tuple[ToolCall, int]:
        name, end = name_at(text, place)
        # Models vary spaces around the marker.
        if found := re.compile(r"\s*" + loose(self.mark)).match(text, end):
            end = found.end()
        else:
            behind = text.find(self.mark_end, end) if self.mark_end else -1
            # Search only up to the next turn or call, whose marker must not be skipped.
            if behind < 0 or any(mark in text[end:behind] for mark in self.barred):
                raise CallFault(f"of {name} has no {self.mark.strip() or 'JSON object'} behind the name")
            end = behind + len(self.mark_end)
        arguments, end = json_at(text, skip_space(text, end))
        return called(name, arguments), end


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """The name, then a tagged key and value per argument. Values are plain text or JSON.

    `types` are parameter types from the tool schemas: a value is JSON unless its type is "string". Without a type, it
    is JSON if it parses to a non-string.
    """

    name_end: str
    key_start: str
    key_end: str
    value_end: str
    types: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def start(self) -> str:
        return NAME.pattern + loose(self.name_end)

    def read(self, text: str, place: int) -> tuple[ToolCall, int]:
        name, end = name_at(text, place)
        head = re.compile(r"\s*" + loose(self.name_end)).match(text, end)
        if head is None:
            raise CallFault(f"of {name} has no {self.name_end.strip()} behind the name")
        end, arguments = head.end(), dict[str, object]()
        opens, divides = re.compile(r"\s*" + loose(self.key_start)), re.compile(_line_break(self.key_end))
        closes = re.compile(_line_break(self.value_end))
        # Repeat until no argument opens, since their number is unknown.
        while opened := opens.match(text, end):
            divided = divides.search(text, opened.end())
            closed = closes.search(text, divided.end()) if divided else None
            if divided is None or closed is None:
                mark = self.value_end if divided else self.key_end
                raise CallFault(f"of {name} has an argument without {mark.strip()} behind it")
            key = text[opened.end() : divided.start()].strip()
            # A repeated key is ambiguous.
            if not key or key in arguments:
                raise CallFault(f"of {name} has an argument {'twice' if key else 'without a name'}: {key!r}")
            arguments[key] = self._value(name, key, text[divided.end() : closed.start()])
            end = closed.end()
        return called(name, arguments), end

    def _value(self, name: str, key: str, written: str) -> object:
        kind = self.types.get(name, {}).get(key)
        if kind == "string":
            return written
        # Before JSON: templates write Python's words, which are not valid JSON.
        if written.strip() in _PYTHON_WORDS:
            return _PYTHON_WORDS[written.strip()]
        try:
            value, end = json_at(written, skip_space(written, 0))
        except CallFault:
            return written
        # Text such as 12 apples starts with a number.
        is_whole = skip_space(written, end) == len(written)
        return value if is_whole and (kind is not None or not isinstance(value, str)) else written


def called(name: str, arguments: object) -> ToolCall:
    """Return the call. Arguments may be a JSON object as text. Raises CallFault for other arguments."""
    if isinstance(arguments, str):
        arguments, _ = json_at(arguments, skip_space(arguments, 0))
    if not isinstance(arguments, dict):
        raise CallFault(f"of {name} has arguments that are no JSON object")
    try:
        # Reject what cannot be stored: a lone surrogate or deep nesting.
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise CallFault("has half a character in its text, or is nested too deeply") from None
    return ToolCall(name.strip(), arguments)


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def json_at(text: str, place: int) -> tuple[object, int]:
    """Parse the JSON value at `place`. Returns the value and its end. Raises CallFault if it is invalid."""
    try:
        # NaN and Infinity are not JSON, and servers would reject them.
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise CallFault(f"has broken JSON: {error.msg} at its character {error.pos - place + 1}") from None
    except RecursionError:
        raise CallFault("has broken JSON: it is nested too deeply") from None
    except ValueError as error:
        raise CallFault(f"has broken JSON: {error}") from None


def name_at(text: str, place: int) -> tuple[str, int]:
    """Return the name at `place` and its end. Raises CallFault if there is none."""
    found = NAME.match(text, place)
    if found is None:
        raise CallFault("has no name")
    return found.group(), found.end()


def loose(mark: str) -> str:
    """Return a regular expression for a marker with flexible inner white space, and none around it."""
    return r"\s*".join(map(re.escape, mark.split()))


def _line_break(mark: str) -> str:
    """Like `loose`, plus the line breaks around the marker, which are not part of a value."""
    before, after = mark.startswith("\n"), mark.endswith("\n")
    return r"\n?" * before + loose(mark) + r"\n?" * after


Place = tuple[CallBody, Span]
"""A notation, and the known call's span in the rendered text."""


def body_of(text: str, call: ToolCall, added: Sequence[str]) -> Place | None:
    """Detect the notation of a known call in rendered text; None if it is unknown.

    The call has two arguments, a text and a number. `added` are the tokenizer's added tokens.
    """
    readers: tuple[Callable[[], Place | None], ...] = (
        lambda: _json_body(text, call),
        lambda: _named_json_body(text, call, added),
        lambda: _tagged_body(text, call),
    )
    return next((place for reader in readers if (place := reader()) is not None), None)


def _json_body(text: str, call: ToolCall) -> Place | None:
    # Try each brace before the name: outer objects may contain the call.
    named = text.find(call.name)
    for found in re.finditer(r"\{", text[: max(named, 0)]):
        try:
            value, end = json_at(text, found.start())
        except CallFault:
            continue
        for path, inner in _objects(value):
            name = next((key for key, entry in inner.items() if entry == call.name), None)
            arguments = next((key for key, entry in inner.items() if _same(entry, call.arguments)), None)
            if name is not None and arguments is not None:
                return _JsonBody(path, name, arguments), (found.start(), end)
    return None


def _objects(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, object]]]:
    """Yield an object and its nested objects, with the keys that lead to each."""
    if isinstance(value, dict):
        yield path, value
        for key, entry in value.items():
            yield from _objects(entry, (*path, key))


def _same(entry: object, arguments: Mapping[str, object]) -> bool:
    """Return whether an entry equals the arguments, as object or JSON text."""
    try:
        return (json.loads(entry) if isinstance(entry, str) else entry) == arguments
    except ValueError:
        return False


def _named_json_body(text: str, call: ToolCall, added: Sequence[str]) -> Place | None:
    start = text.find(call.name)
    brace = text.find("{", start + len(call.name)) if start >= 0 else -1
    if brace < 0:
        return None
    try:
        value, end = json_at(text, brace)
    except CallFault:
        return None
    if value != call.arguments:
        return None
    mark = text[start + len(call.name) : brace]
    # The longest token, because one may be the end of another.
    mark_end = max((token for token in added if mark.rstrip().endswith(token)), key=len, default="")
    return NamedJsonBody(mark, mark_end), (start, end)


def _tagged_body(text: str, call: ToolCall) -> Place | None:
    """Detect the tagged notation from the text between name, keys and values."""
    # The names and values occur in this order in all templates.
    places, end = [], 0
    words = [call.name, *(str(word) for item in call.arguments.items() for word in item)]
    for word in words:
        start = text.find(word, end)
        if start < 0:
            return None
        end = start + len(word)
        places.append((start, end))
    after_name, key_end, between, other_end = (
        text[first[1] : second[0]] for first, second in itertools.pairwise(places)
    )
    value_end = _whole_tags(between, text[end:])
    key_start = between.removeprefix(value_end)
    # Both arguments must be written alike, or the notation is another one.
    if key_end != other_end or not (value_end and key_start.strip() and after_name.endswith(key_start)):
        return None
    name_end = after_name.removesuffix(key_start)
    return TaggedBody(name_end, key_start, key_end, value_end), (places[0][0], end + len(value_end))


def _whole_tags(first: str, second: str) -> str:
    """Return the complete tags in the common prefix."""
    # Only complete tags: the common prefix may end within one.
    shared = first[: num_shared(first, second)]
    return shared[: shared.rfind(">") + 1]
