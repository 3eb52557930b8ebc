"""Tokens between a sampled turn and the next one: end of turn, observations and generation prompt.

Earlier turns keep their sampled token IDs and are never retokenized. Templates that rewrite history, such as Qwen 3's,
have no effect, because only text after a stand-in for the last turn is used.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation, Message, Role, Tool, ToolCall
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.text import TRIAL, TemplateFault
from rlhf_cli.data.templates.turn_spans import THOUGHT_END, THOUGHT_START
from rlhf_cli.data.tokenizing.plain_text import CUT, PlainText
from rlhf_cli.errors import UsageError

MALFORMED = "malformed_call"
"""Tool name in the result of a call without a name."""
_STAND_IN = f"7f3a{CUT}7f3a"
"""Stand-in for the sampled turn. Untrusted text cannot contain its split marker."""
_EARLIER = "7f3a"
_THOUGHT_MARK = re.compile(f"({re.escape(THOUGHT_START)}|{re.escape(THOUGHT_END)})")
_PROBES = ("probe 7f3a", "other 7f3a")


def call_id(number: int) -> str:
    """Return the ID of an episode's call, with nine letters and digits as required by Mistral's template."""
    return f"call{number:05}"


def tool_results(results: Sequence[tuple[str | None, str]], *, first: int) -> tuple[Message, ...]:
    """Return messages with call results, given as tool name and answer; the name is None for a malformed call.

    Args:
        first: number of earlier calls in the episode.
    """
    return tuple(
        Message("tool", answer, tool_call_id=call_id(number), name=name or MALFORMED)
        for number, (name, answer) in enumerate(results, start=first)
    )


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A way to write the turn before observations: as text, or as calls with these results."""

    as_calls: bool
    max_calls: int | None = None

    def turn(self, observations: Sequence[Message], text: str = _STAND_IN) -> Message:
        """Return the assistant message before these observations, with a stand-in for its text."""
        answers = _answers(observations)
        if not self.as_calls or not answers:
            return Message("assistant", text)
        calls = (ToolCall(one.name or MALFORMED, {"text": text}, one.tool_call_id) for one in answers)
        return Message("assistant", "", tuple(calls)[: self.max_calls])

    def history(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return earlier messages, with turns before call results rewritten to make exactly these calls."""
        written: list[Message] = []
        for number, message in enumerate(messages):
            answers = _answers(messages[number + 1 :]) if message.role == "assistant" else ()
            plain = replace(message, content=message.content.replace(CUT, ""), tool_calls=())
            written.append(self.turn(answers, _EARLIER) if answers else plain)
        return tuple(written)


def _answers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the tool results at the start of the messages."""
    return tuple(itertools.takewhile(lambda message: message.role == "tool", messages))


_STAND_INS = (_StandIn(as_calls=True), _StandIn(as_calls=True, max_calls=1), _StandIn(as_calls=False))


@dataclass(frozen=True, slots=True)
class _Habits:
    """How the template continues before observations of a role.

    `ends_turn`: it ends the previous turn with a token that the engine may sample. `needs_history`: the text after a
    turn depends on earlier messages.
    """

    ends_turn: bool
    needs_history: bool


class TurnBridge:
    """Renders the tokens after a sampled turn.

    Args:
        tools: environment functions in OpenAI format; with tools, observations are call results.
        end_ids: tokens at which the engine ends a turn.
        vocab_size: number of embeddings in the model.

    Raises:
        UsageError: the template does not support observations, or one of its tokens has no embedding.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        *,
        end_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._vocab_size = vocab_size
        self._plain = PlainText(tokenizer, tokenizer.get_chat_template(), vocab_size=vocab_size)
        # Tool descriptions are untrusted too, since they come from servers.
        self._tools: tuple[Tool, ...] = tuple(map(self._guarded_values, tools))
        self._ends = self._found_ends(end_ids)
        self._habits: dict[Role, _Habits] = {}
        self._num_controls: dict[tuple[object, ...], int] = {}
        self._stand_in = self._found_stand_in()
        # Try once at startup, so that a run does not fail in its first episode.
        self._try()

    def _found_ends(self, end_ids: Sequence[int]) -> dict[str, int]:
        """Return end-of-turn tokens by text: from the engine and from the template."""
        try:
            own = self._template.ends_of_turn
        except TemplateFault:
            own = ()
        added = {number: token.content for number, token in self._tokenizer.added_tokens_decoder.items()}
        lasts = {end for end in added.values() if any(run.endswith(end) for run in own)}
        return {text: number for number, text in added.items() if number in end_ids or text in lasts}

    def _found_stand_in(self) -> _StandIn:
        """Return the first way to write a turn before observations that the template accepts."""
        reason = "it leaves them out"
        for stand_in in _STAND_INS if self._tools else _STAND_INS[-1:]:
            try:
                if all(self._shows(stand_in, self._probes(count)) for count in (1, 2)):
                    return stand_in
            except TemplateFault as fault:
                reason = str(fault)
        kind = "results of tools" if self._tools else "a further message of the user"
        raise UsageError(
            f"the chat template of {self._tokenizer.name_or_path or 'this tokenizer'!r} has no place for {kind}, in "
            f"which observations of the environment stand ({reason}): use another one (--tokenizer_chat_template FILE)"
        )

    def _probes(self, count: int) -> tuple[Message, ...]:
        if not self._tools:
            return (Message("user", _PROBES[0]),)
        name = self._tools[0]["function"]["name"]
        return tool_results([(name, text) for text in _PROBES[:count]], first=0)

    def _shows(self, stand_in: _StandIn, probes: Sequence[Message]) -> bool:
        """Return whether observations follow the stand-in; for calls, after an end of turn."""
        behind = self._behind(stand_in, TRIAL[:1], probes)
        places = [behind.find(probe.content) for probe in probes]
        in_order = places == sorted(places) and places[0] >= 0
        return in_order and (not stand_in.as_calls or 0 <= self._end_in(behind) < places[0])

    def _behind(self, stand_in: _StandIn, history: Sequence[Message], observations: Sequence[Message]) -> str:
        """Return the text after the stand-in for the last turn. Raises TemplateFault if it is missing."""
        messages = (*stand_in.history(history), stand_in.turn(observations), *observations)
        text, _ = self._template.text.render(messages, self._tools, add_generation_prompt=True)
        # The last one: earlier turns contain a stand-in without the split marker.
        place = text.rfind(_STAND_IN)
        if place < 0:
            raise TemplateFault("the chat template leaves out or alters the assistant's turn before an observation")
        return text[place + len(_STAND_IN) :]

    def _end_in(self, text: str) -> int:
        """Return the position of the first end of turn, -1 without one."""
        return min((place for end in self._ends if (place := text.find(end)) >= 0), default=-1)

    @cached_property
    def _end_is_header(self) -> bool:
        """Whether the end of a turn is the next one's header, as in GLM: a conversation's last turn then has no end."""
        last = (*TRIAL[:1], Message("assistant", _STAND_IN))
        text, _ = self._template.text.render(last, self._tools)
        return self._end_in(text[text.rfind(_STAND_IN) :]) < 0

    def _habits_before(self, role: Role) -> _Habits:
        """Return the template's behavior before observations of a role, determined once with probes."""
        if role not in self._habits:
            probes = self._probes(1) if role == "tool" else (Message("user", _PROBES[0]),)
            plain = self._behind(self._stand_in, TRIAL[:1], probes)
            answered = (*TRIAL[:1], Message("assistant", ""), *self._probes(1))
            others = [TRIAL[:3], *([answered] if self._tools else []), (Message("system", "first system"), *TRIAL[:1])]
            changes = any(
                self._behind(self._stand_in, history, probes) != plain for history in others if self._takes(history)
            )
            self._habits[role] = _Habits(0 <= self._end_in(plain) < plain.find(_PROBES[0]), changes)
        return self._habits[role]

    def _takes(self, history: Sequence[Message]) -> bool:
        """Return whether the template accepts these messages. For example, Gemma 2 rejects system messages."""
        try:
            self._behind(self._stand_in, history, self._probes(1))
        except TemplateFault:
            return False
        return True

    def _try(self) -> None:
        """Raise UsageError if the template changes split control tokens, or if one of its tokens has no embedding."""
        harmless = self._probes(1)[0]
        probe = replace(harmless, content=self._plain.guarded("a" + "".join(self._ends) + "b"))
        try:
            found, named = (self._behind(self._stand_in, TRIAL[:1], (one,)).count(CUT) for one in (probe, harmless))
            self.after(Conversation(TRIAL[:2]), self._probes(1), last_id=-1)
        except TemplateFault as fault:
            raise UsageError(f"{fault}; give another one with --tokenizer_chat_template FILE") from fault
        if found - named != probe.content.count(CUT):
            raise UsageError(
                "the chat template alters characters of Unicode's private use, so that control tokens in observations "
                "could not be kept apart: give another one with --tokenizer_chat_template FILE"
            )

    def after(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens between the end of the sampled turn and the start of the next one.

        A sampled end of turn is not repeated. Control tokens in observations become plain text.

        Args:
            conversation: messages up to and including the sampled turn. Text of earlier turns matters only if the
            template's text after a turn depends on it.
            observations: tool results, user messages, or both in this order.
            last_id: last token of the sampled turn.

        Raises:
            TemplateFault: the template rejects these messages, or a token has no embedding.
        """
        history = conversation.messages[:-1]
        # Guarding is enough for most text; splitting everywhere changes its tokens, so do it only if needed.
        ids = self._ids(history, observations, self._plain.guarded, last_id)
        if self._plain.num_controls(ids) != self._expected_controls(history, observations, last_id):
            ids = self._ids(history, observations, self._plain.cut_everywhere, last_id)
        return self._checked(ids)

    def _expected_controls(self, history: Sequence[Message], observations: Sequence[Message], last_id: int) -> int:
        """Return the number of control tokens around harmless observations of the same tools."""
        harmless = [replace(one, content=_PROBES[0]) for one in observations]
        if self._habits_before(observations[0].role).needs_history:
            return self._plain.num_controls(self._ids(history, harmless, self._plain.guarded, last_id))
        key = (last_id, *((one.role, one.name) for one in observations))
        if key not in self._num_controls:
            ids = self._ids(history, harmless, self._plain.guarded, last_id)
            self._num_controls[key] = self._plain.num_controls(ids)
        return self._num_controls[key]

    def _ids(
        self, history: Sequence[Message], observations: Sequence[Message], guard: Callable[[str], str], last_id: int
    ) -> list[int]:
        habits = self._habits_before(observations[0].role)
        guarded = [replace(self._with_guarded_names(one), content=guard(one.content)) for one in observations]
        behind = self._behind(self._stand_in, history if habits.needs_history else TRIAL[:1], guarded)
        is_ended = last_id in self._ends.values()
        # A stand-in as a call contains text of its own, which ends at the template's end of turn.
        if habits.ends_turn and (is_ended or self._stand_in.turn(observations).tool_calls):
            behind = behind[self._end_in(behind) :]
        ids = self._plain.ids(behind)
        is_repeated = habits.ends_turn and is_ended and (ids[0] == last_id or not self._end_is_header)
        return ids[1:] if is_repeated else ids

    def _checked(self, ids: list[int]) -> list[int]:
        """Return the tokens. Raises TemplateFault if one has no embedding, which would crash the engine."""
        largest = max(ids, default=-1)
        if largest >= self._vocab_size:
            raise TemplateFault(
                f"the chat template writes the token {self._tokenizer.convert_ids_to_tokens(largest)!r} with the id "
                f"{largest:,}, and the model has {self._vocab_size:,} embeddings"
            )
        return ids

    def opening(self, conversation: Conversation, observation: str) -> list[int]:
        """Return the prompt of an episode with an initial observation, appended to the last message.

        Raises:
            TemplateFault: the template rejects the conversation.
        """
        *before, last = conversation.messages
        # Guard with the preceding text, because a control token may span both.
        begun = replace(last, content=self._plain.guarded(observation, behind=last.content))
        text = self._template.prompt(Conversation((*before, begun), self._tools))
        return self._checked(self._plain.ids(text))

    def prompt(self, conversation: Conversation) -> list[int]:
        """Render a program's conversation up to the next turn.

        Control tokens in messages and tools become plain text, except for reasoning markers in assistant turns.

        Raises:
            TemplateFault: the template rejects the conversation, or a token has no embedding.
        """
        messages = (self._with_guarded_names(self._guarded_message(message)) for message in conversation.messages)
        conversation = replace(conversation, messages=tuple(messages), tools=self._tools)
        text = self._template.prompt(conversation)
        return self._checked(self._plain.ids(text))

    def _guarded_message(self, message: Message) -> Message:
        if message.role != "assistant":
            return replace(message, content=self._plain.guarded(message.content))
        # Reasoning markers of an assistant are legitimate, and templates look for them.
        pieces = _THOUGHT_MARK.split(message.content)
        content = "".join(piece if place % 2 else self._plain.guarded(piece) for place, piece in enumerate(pieces))
        calls = (
            ToolCall(
                self._plain.guarded(call.name), self._guarded_values(call.arguments), self._guarded_values(call.id)
            )
            for call in message.tool_calls
        )
        return replace(message, content=content, tool_calls=tuple(calls))

    def _with_guarded_names(self, message: Message) -> Message:
        """Guard a message's tool name and call ID."""
        names = {"name": self._guarded_values(message.name), "tool_call_id": self._guarded_values(message.tool_call_id)}
        return replace(message, **names)

    def _guarded_values(self, value: Any) -> Any:
        """Guard the strings in a JSON value."""
        match value:
            case str():
                return self._plain.guarded(value)
            case dict():
                return {self._plain.guarded(key): self._guarded_values(inner) for key, inner in value.items()}
            case list():
                return [self._guarded_values(inner) for inner in value]
            case _:
                return value
