"""Calls with arguments as pairs in brackets: Python keyword arguments, or keys and values as in Gemma 4.

A value is quoted text, a number, a word such as true or None, or a list or object of values. Nothing is evaluated.
"""

import ast
import re
from dataclasses import dataclass

from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.templates.call_bodies import NAME, CallFault, Place, called, json_at, name_at
from rlhf_cli.data.templates.turn_spans import skip_space

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD = re.compile(r"[^,:=()\[\]{}]+")
_PYTHON_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _PairsBody:
    """The name, then pairs in brackets. `quote` surrounds text; "" for Python string literals."""

    brackets: str
    assign: str
    quote: str

    @property
    def start(self) -> str:
        return NAME.pattern + r"\s*" + re.escape(self.brackets[0])

    def read(self, text: str, place: int) -> tuple[ToolCall, int]:
        name, end = name_at(text, place)
        try:
            arguments, end = self._pairs(text, skip_space(text, end), self.brackets, self.assign)
        except CallFault as fault:
            raise CallFault(f"of {name} has arguments that cannot be read: {fault}") from None
        except RecursionError:
            raise CallFault(f"of {name} has arguments that are nested too deeply") from None
        return called(name, arguments), end

    def _pairs(self, text: str, place: int, brackets: str, assign: str) -> tuple[dict[str, object], int]:
        """Parse the bracketed pairs at `place`. Returns the pairs and their end."""
        place = self._mark(text, place, brackets[0])
        pairs: dict[str, object] = {}
        while not text.startswith(brackets[1], place):
            # A separator before each pair but the first.
            if pairs:
                place = self._mark(text, place, ",")
            key, place = self._text(text, place) or self._word(text, place)
            place = self._mark(text, place, assign)
            if key in pairs:
                raise CallFault(f"{key} is there twice")
            pairs[key], place = self._value(text, place)
        return pairs, place + 1

    def _value(self, text: str, place: int) -> tuple[object, int]:
        """Parse the value at `place`. Returns the value, and the position of the next non-space character."""
        value: object
        if text.startswith("{", place):
            value, place = self._pairs(text, place, "{}", ":")
        elif text.startswith("[", place):
            value, place = self._listed(text, place)
        # Quoted text first, because it may contain any character.
        elif found := self._text(text, place):
            return found
        else:
            # Unquoted words are numbers or constants.
            word, behind = self._word(text, place)
            if word in _WORDS:
                return _WORDS[word], behind
            return _number(word), behind
        return value, skip_space(text, place)

    def _listed(self, text: str, place: int) -> tuple[list[object], int]:
        place = self._mark(text, place, "[")
        values: list[object] = []
        while not text.startswith("]", place):
            if values:
                place = self._mark(text, place, ",")
            value, place = self._value(text, place)
            values.append(value)
        return values, place + 1

    def _text(self, text: str, place: int) -> tuple[str, int] | None:
        """Parse the quoted text at `place`. Returns the text and the next position; None without quotes."""
        # Without a fixed quote, texts are Python literals with escapes.
        if not self.quote:
            found = _PYTHON_TEXT.match(text, place)
            return None if found is None else (_python_text(found.group()), skip_space(text, found.end()))
        if not text.startswith(self.quote, place):
            return None
        start = place + len(self.quote)
        end = text.find(self.quote, start)
        if end < 0:
            raise CallFault(f"a text does not end with {self.quote}")
        return text[start:end], skip_space(text, end + len(self.quote))

    def _word(self, text: str, place: int) -> tuple[str, int]:
        found = _WORD.match(text, place)
        if found is None:
            raise CallFault(f"a key or a value was expected before {text[place : place + 20]!r}")
        return found.group().strip(), found.end()

    def _mark(self, text: str, place: int, mark: str) -> int:
        """Return the position after a marker. Raises CallFault if it is missing."""
        if not text.startswith(mark, place):
            raise CallFault(f"{mark} was expected before {text[place : place + 20]!r}")
        return skip_space(text, place + len(mark))


def _number(word: str) -> object:
    try:
        value, end = json_at(word, 0)
    except CallFault:
        end = -1
    if end != len(word):
        raise CallFault(f"{word!r:.60} is neither a number nor in quotes")
    return value


def _python_text(written: str) -> str:
    try:
        # literal_eval rejects line breaks in a text, which models write.
        return str(ast.literal_eval(written.replace("\n", "\\n")))
    except (ValueError, SyntaxError):
        raise CallFault(f"the text {written!r:.60} has a broken escape") from None


def pairs_body_of(text: str, call: ToolCall) -> Place | None:
    """Detect the pair notation of a known call in rendered text, None if there is none."""
    start = text.find(call.name)
    if start < 0 or not call.arguments:
        return None
    (key, value), *_ = call.arguments.items()
    shape = re.compile(r"([({])\s*" + re.escape(key) + r"\s*([=:])\s*(.*?)" + re.escape(str(value)), re.DOTALL)
    found = shape.match(text, start + len(call.name))
    if found is None:
        return None
    # Python literals use either quote.
    quote = "" if found[3] in ("'", '"') else found[3]
    body = _PairsBody({"(": "()", "{": "{}"}[found[1]], found[2], quote)
    try:
        read, end = body.read(text, start)
    except CallFault:
        return None
    # Parse the known call back, which confirms the notation.
    return (body, (start, end)) if read.arguments == call.arguments else None
