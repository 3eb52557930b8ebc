"""Parses tool calls in sampled turns, using the markers in the chat template's rendering of a known call.

Works without a list of model families. An unknown notation is rejected before sampling.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Message, Tool, ToolCall
from rlhf_cli.data.templates.call_bodies import CallBody, CallFault, NamedJsonBody, Place, TaggedBody, body_of, loose
from rlhf_cli.data.templates.call_pairs import pairs_body_of
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.text import TRIAL, TRIAL_TOOL, TemplateFault
from rlhf_cli.data.templates.turn_spans import EMPTY_THOUGHT, THOUGHT_END, THOUGHT_START, num_shared, skip_space
from rlhf_cli.errors import UsageError

_WORDS = TRIAL[1].content
_FIRST = ToolCall("probe_7f3a", {"first_7f3a": "copper 7f3a", "second_7f3a": 73}, "abcdefghi")
_SECOND = ToolCall("other_7f3a", {"fifth_7f3a": "iron 7f3a", "sixth_7f3a": 37}, "jklmnopqr")
_BARE = ToolCall("bare_7f3a", {}, "stuvwxyza")
"""Probe calls with unique text. Mistral's template requires nine-character IDs."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn: text without calls, calls in order, and an error message per malformed call.

    Malformed calls remain in the content. Equal errors are listed once.
    """

    content: str
    calls: tuple[ToolCall, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class _CallFormat:
    """Markers around calls, and the notation between them.

    - `between`: separates calls that share one opening and closing marker.
    - `end`: end token of a turn with calls, "" if the template writes none.
    - `opens_thought`: the generation prompt starts reasoning.

    An opening marker without words or control tokens, such as Llama 3's "{", opens calls only at the start of a turn.
    """

    opening: str
    between: str | None
    closing: str
    body: CallBody
    end: str
    opens_thought: bool
    controls: tuple[str, ...]

    @cached_property
    def _is_at_start(self) -> bool:
        return not any(token in self.opening for token in self.controls) and not re.search(r"\w\w", self.opening)

    @cached_property
    def _opens(self) -> re.Pattern[str]:
        if not self._is_at_start:
            return re.compile(loose(self.opening))
        leading = "|".join(map(re.escape, self.controls))  # such as Llama 3's <|python_tag|>
        return re.compile(rf"\s*(?:{leading})?\s*{loose(self.opening)}(?=\s*{self.body.start})")

    def parse(self, text: str, *, opens_thought: bool | None = None) -> ParsedTurn:
        """Parse a turn decoded with special tokens and without its end token.

        Calls in reasoning are ignored. Unterminated reasoning includes all following text.

        Args:
            opens_thought: whether the text before the turn starts reasoning; by default, as in the generation prompt.
        """
        calls: list[ToolCall] = []
        faults: list[str] = []
        is_opened = self.opens_thought if opens_thought is None else opens_thought
        kept, written, place = "", 0, _end_of_thought(text) if is_opened else 0
        while (opened := self._next_opening(text, place)) is not None:
            try:
                found, place = self._calls_at(text, opened.end())
            except CallFault as fault:
                if self._is_call(text, opened):
                    faults.append(f"The call {fault}, so it was not made.")
                # Continue after a broken call, since later calls may be valid.
                place = len(text) if self._is_at_start else opened.end()
                continue
            calls += found
            kept += text[written : opened.start()]
            written = place
        return ParsedTurn((kept + text[written:]).strip(), tuple(calls), tuple(dict.fromkeys(faults)))

    def _is_call(self, text: str, opened: re.Match[str]) -> bool:
        """Return whether an opening without a valid call was meant as a call. A plain word marker may be part of the
        answer.
        """
        if any(token in self.opening for token in self.controls) or self._is_at_start or "<" in self.opening:
            return True
        return re.compile(r"\s*" + self.body.start).match(text, opened.end()) is not None

    def _next_opening(self, text: str, place: int) -> re.Match[str] | None:
        """Return the next opening marker outside reasoning."""
        while True:
            opened = self._opens.match(text, place) if self._is_at_start else self._opens.search(text, place)
            thought = _THOUGHT_OPENS.search(text, place)
            # Reasoning that starts before the next call may contain examples of calls.
            if thought is None or (opened is not None and opened.start() < thought.start()):
                return opened
            place = _end_of_thought(text, thought.end())

    def _calls_at(self, text: str, place: int) -> tuple[list[ToolCall], int]:
        """Parse the calls after an opening marker. Returns the calls and the end of the closing marker. Raises
        CallFault.
        """
        between = None if self.between is None else re.compile(r"\s*" + loose(self.between))
        closing = re.compile(r"\s*" + loose(self.closing) if self.closing.strip() else "")
        calls = []
        while True:
            call, place = self.body.read(text, skip_space(text, place))
            calls.append(call)
            if between is not None and (divided := between.match(text, place)):
                place = divided.end()
            elif closed := closing.match(text, place):
                return calls, closed.end()
            else:
                raise CallFault(f"of {call.name} does not end with {self.closing.strip()}")


_THOUGHT_OPENS = re.compile(rf"{re.escape(THOUGHT_START)}|\[THINK\]")
"""Reasoning markers of most models, and of Mistral."""
_THOUGHT_ENDS = re.compile(rf"{re.escape(THOUGHT_END)}|\[/THINK\]")


def begins_thought(text: str) -> bool:
    """Return whether a text ends with a marker that starts reasoning."""
    return re.search(rf"(?:{_THOUGHT_OPENS.pattern})\s*\Z", text) is not None


def _end_of_thought(text: str, place: int = 0) -> int:
    end = _THOUGHT_ENDS.search(text, place)
    return len(text) if end is None else end.end()


def call_format_of(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> _CallFormat:
    """Detect the call format of the tokenizer's chat template. Argument types come from the tools.

    Raises:
        UsageError: the template renders no calls, or uses an unknown notation.
    """
    probe = _Probe(template, tokenizer)
    text = template.text
    if not (text.shows_tools and text.takes_calls) or probe.turn(_FIRST) is None:
        raise UsageError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'!r} has no place for tools and calls, "
            "and the environment has tools: use a template that shows calls (--tokenizer_chat_template FILE), or an "
            "environment with `step(text)` instead of tools"
        )
    found = probe.format()
    if found is None or not probe.is_read_by(found):
        raise UsageError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'!r} writes calls of tools in a notation "
            f"that cannot be read back, {(probe.turn(_FIRST) or '')[:120]!r}: use a template that writes them as JSON "
            "or in tags (--tokenizer_chat_template FILE), or an environment with `step(text)` instead of tools"
        )
    body = replace(found.body, types=_types(tools)) if isinstance(found.body, TaggedBody) else found.body
    return replace(found, body=body)


def written_call(
    template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, found: _CallFormat, call: ToolCall
) -> str | None:
    """Render a turn with this call, without its end token; None if the template does not support it."""
    # All IDs have the same form, so the probe's ID works for any call.
    turn = _Probe(template, tokenizer).turn(replace(call, id=_FIRST.id))
    return None if turn is None else _as_sampled(turn, found).strip()


def _as_sampled(turn: str, found: _CallFormat) -> str:
    """Return a turn as sampled after the generation prompt, without its end token."""
    text = turn.rpartition(found.end)[0] if found.end and found.end in turn else turn
    return THOUGHT_END + text if found.opens_thought and THOUGHT_END not in text else text


def _types(tools: Sequence[Tool]) -> dict[str, dict[str, object]]:
    """Return parameter types per tool."""
    functions = [tool["function"] for tool in tools]
    listed = {function["name"]: (function.get("parameters") or {}).get("properties") or {} for function in functions}
    return {
        name: {key: entry["type"] for key, entry in properties.items() if isinstance(entry, dict) and "type" in entry}
        for name, properties in listed.items()
    }


class _Probe:
    """Turns with known calls, rendered by the template."""

    def __init__(self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template = template
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        # Longest first, so that a token is not split at one that it contains.
        self._controls = tuple(sorted(filter(str.strip, added), key=len, reverse=True))
        try:
            self._ends = template.ends_of_turn
        except TemplateFault:
            self._ends = ()

    def turn(self, *calls: ToolCall, content: str = "") -> str | None:
        """Render a turn after the generation prompt; None if its calls are missing."""
        text, asked = self._template.text, TRIAL[:1]
        try:
            whole, _ = text.render((*asked, Message("assistant", content, calls)), (TRIAL_TOOL,))
            prompt, _ = text.render(asked, (TRIAL_TOOL,), add_generation_prompt=True)
        except TemplateFault:
            return None
        # The prompt may end within a control token of the turn.
        turn = whole[len(self._whole_tokens(whole, num_shared(prompt, whole))) :]
        return turn if all(call.name in turn for call in calls) else None

    def _place_of(self, text: str, call: ToolCall) -> Place | None:
        return body_of(text, _as_read(call), self._controls) or pairs_body_of(text, call)

    def format(self) -> _CallFormat | None:
        """Detect the format; None without a known notation."""
        alone = self.turn(_FIRST) or ""
        place = self._place_of(alone, _FIRST)
        if place is None:
            return None
        body, (start, stop) = place
        between, second_tail = self._divided()
        closing, end = self._without_end(alone[stop:], between)
        if second_tail is not None:
            second, end = self._without_end(second_tail, between)
            # Only the common part closes every call.
            closing = closing[: num_shared(closing, second)]
        opening = self._opening(alone[:start])
        if isinstance(body, NamedJsonBody):
            body = replace(body, barred=(opening, *self._ends))
        # Calls with complete markers each need no separator.
        if between is not None and re.fullmatch(loose(closing + " " + opening), between.strip()):
            between = None
        opens_thought = begins_thought(self._template.text.header)
        return _CallFormat(opening, between, closing, body, end, opens_thought, self._controls)

    def _divided(self) -> tuple[str | None, str | None]:
        """Return the text between two calls, and after them; None if a turn supports only one call."""
        both = self.turn(_FIRST, _SECOND) or ""
        first, second = (self._place_of(both, call) for call in (_FIRST, _SECOND))
        if first is None or second is None or first[1][1] > second[1][0]:
            return None, None
        return both[first[1][1] : second[1][0]], both[second[1][1] :]

    def _opening(self, head: str) -> str:
        """Return the marker before a call: the start of a turn without text, as far as it also follows text."""
        worded = self.turn(_FIRST, content=_WORDS) or ""
        place = self._place_of(worded, _FIRST)
        words = worded.find(_WORDS)
        if place is None or not 0 <= words < place[1][0]:
            return EMPTY_THOUGHT.sub("", head).strip()
        behind = worded[words + len(_WORDS) : place[1][0]]
        num_last = num_shared(head[::-1], behind[::-1])
        return head[len(head) - num_last :].strip()

    def _without_end(self, tail: str, between: str | None) -> tuple[str, str]:
        """Split the text after a call at the end of turn. Returns the closing marker and the end token.

        The end may be a token used only for calls, such as gpt-oss's <|call|>: it then is all that follows the closing
        marker.
        """
        found = [(place, end) for end in self._ends if (place := tail.find(end)) >= 0]
        if found:
            place, end = min(found)
            return tail[:place], end
        closing = "" if between is None else self._whole_tokens(tail, num_shared(tail, between))
        rest = tail[len(closing) :].strip()
        return (closing, rest) if rest in self._controls else (tail, "")

    def _whole_tokens(self, text: str, stop: int) -> str:
        """Truncate a text without splitting a control token."""
        tokens = re.finditer("|".join(map(re.escape, self._controls)) or r"(?!)", text)
        return text[: next((token.start() for token in tokens if token.start() < stop < token.end()), stop)]

    def is_read_by(self, found: _CallFormat) -> bool:
        """Return whether the format parses the template's turns."""
        # Include a call without arguments, and a turn with text before the call.
        turns = [((_FIRST,), ""), ((_BARE,), ""), ((_FIRST, _SECOND), ""), ((_FIRST,), _WORDS)]
        shown = [(calls, self.turn(*calls, content=content)) for calls, content in turns]
        for calls, turn in shown:
            if turn is None or (len(calls) > 1 and self._divided()[0] is None):
                continue
            parsed = found.parse(_as_sampled(turn, found))
            if parsed.faults or parsed.calls != tuple(map(_as_read, calls)):
                return False
        return True


def _as_read(call: ToolCall) -> ToolCall:
    """Return the call as parsed, which excludes the ID."""
    return replace(call, id=None)
