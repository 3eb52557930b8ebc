"""Chat templates: renders conversations, and locates the assistant's text.

Only a trial conversation is tokenized here, to find the end of a turn. Templates are rejected if assistant turns cannot
be distinguished from the surrounding text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.templates.text import TRIAL, TRIAL_CALL, TRIAL_TOOL, TemplateFault, TemplateText
from rlhf_cli.data.templates.turn_search import TurnSearch, end_of_shared_prompt
from rlhf_cli.data.templates.turn_spans import (
    Said,
    Span,
    TurnMarks,
    left_out,
    missing_call,
    num_shared,
    place_after,
    skip_space,
    turn_at,
    turn_from,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. `spans` are the trained characters: each assistant text with its end of turn.

    - `prompt`: start of a rollout of the first turn, if the text continues exactly this prompt, else None.
    - `num_unthought`: turns with reasoning removed by the template, which happens before the last turn.
    - `num_inlined`: turns with `reasoning` moved to the content.
    - `left_out`: characters in the spans excluded by loss markers.
    - `weights`: loss weight of each span; () if all are 1.
    """

    text: str
    spans: tuple[Span, ...]
    prompt: str | None
    num_unthought: int = 0
    num_inlined: int = 0
    left_out: tuple[Span, ...] = ()
    weights: tuple[float, ...] = ()


class ChatTemplate:
    """The tokenizer's chat template. Raises UsageError without one.

    `kwargs` are template variables for all renderings, such as Qwen 3's `enable_thinking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object] | None = None) -> None:
        self._tokenizer = tokenizer
        self.text = TemplateText(tokenizer, kwargs)
        """Renders messages to text."""

    @cached_property
    def ends_of_turn(self) -> tuple[str, ...]:
        """Tokens after an assistant turn, as text: first after the last turn, then others.

        Raises TemplateFault if turns do not end with a special token.
        """
        text, _ = self.text.render(TRIAL, ())
        encoding = self._tokenizer(text, add_special_tokens=False)
        ends, runs = [], []
        # The last turn first, because its end stops generation.
        for answer in (TRIAL[3].content, TRIAL[1].content):
            found = text.find(answer)
            if found < 0:
                raise TemplateFault("the chat template leaves out or alters the assistant's text")
            # Templates may write white space before the end.
            place = skip_space(text, found + len(answer))
            token = encoding.char_to_token(place) if place < len(text) else None
            added = None if token is None else self._tokenizer.added_tokens_decoder.get(encoding["input_ids"][token])
            # A part of a token at this place is not the end.
            if added is None or not text.startswith(added.content, place):
                raise _no_end(text[found + len(answer) :])
            ends.append(added.content)
            runs.append(self._special_run(text, place))
        shared = runs[0][: num_shared(*runs)]  # Cohere 2 ends the response and then the turn
        return tuple(dict.fromkeys(["".join(shared)] if shared else ends))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """End token of the last turn, at which generation must stop; () without one.

        A base model may define another end-of-sequence token even though it is trained with this one.
        """
        if not self._tokenizer.is_fast:  # slow tokenizers have no offsets to find the end
            return ()
        try:
            ids = self._tokenizer(self.ends_of_turn[0], add_special_tokens=False)["input_ids"]
        except TemplateFault:
            return ()
        return tuple(ids[-1:])

    def _special_run(self, text: str, place: int) -> list[str]:
        """Return the consecutive special tokens at `place`."""
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        run: list[str] = []
        # The longest token first, because one may be the start of another.
        while found := max((token for token in added if text.startswith(token, place)), key=len, default=""):
            run.append(found)
            place += len(found)
        return run

    @cached_property
    def _marks(self) -> TurnMarks:
        """Markers around turns. A turn with calls may have a different end, such as gpt-oss's `<|call|>`."""
        # Templates without tools reject the trial.
        try:
            text = self.text.render(TRIAL_CALL[:2], (TRIAL_TOOL,))[0].rstrip()
        except TemplateFault:
            return TurnMarks(self.ends_of_turn, self.text.header)
        shows_call = missing_call(text, TRIAL_CALL[1].tool_calls) is None
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        # Only if the call is shown: otherwise the end belongs to other text.
        ends = [token for token in added if text.endswith(token)] if shows_call else []
        return TurnMarks(tuple(dict.fromkeys([*self.ends_of_turn, *ends])), self.text.header)

    def _readable(self, conversation: Conversation) -> Conversation:
        """Move reasoning to where the template reads it: a separate key, or the content."""
        if not _num_reasoned(conversation) or self.text.reasoning_key is not None:
            return conversation
        return replace(conversation, messages=tuple(m.with_reasoning_in_text() for m in conversation.messages))

    def prompt(self, conversation: Conversation) -> str:
        """Render the prompt for the assistant's next turn. Raises TemplateFault if the template rejects it."""
        conversation = self._readable(conversation)
        with self._blame_on_calls(conversation):
            text, _ = self.text.render(conversation.messages, conversation.tools, add_generation_prompt=True)
            self._refuse_left_out(conversation, text, ())
            # Templates without calls may drop them without an error.
            call = missing_call(text, [call for message in conversation.messages for call in message.tool_calls])
            if call is not None:
                raise TemplateFault(f"the chat template leaves out or alters the assistant's call of {call.name}")
        return text

    def example(self, conversation: Conversation) -> Rendered:
        """Render a conversation, and locate its assistant turns.

        Spans come from the template's `{% generation %}` blocks if available, else from comparing the text with the
        text of the messages before each turn.

        Raises:
            TemplateFault: a turn is missing or changed in the text, or has no end. White space around turns and
            reasoning before the last turn may be missing.
        """
        readable = self._readable(conversation)
        if readable is not conversation:
            return replace(self.example(readable), num_inlined=_num_reasoned(conversation))
        with self._blame_on_calls(conversation):
            text, marked = self.text.render(conversation.messages, conversation.tools)
            # The template's own blocks are exact, so prefer them to comparing texts.
            if self.text.marks_turns:
                found = self._marked_turns(conversation, text, marked)
            else:
                found = self._compared_turns(conversation, text)
            self._refuse_left_out(conversation, text, found.spans)
        return found

    @contextmanager
    def _blame_on_calls(self, conversation: Conversation) -> Iterator[None]:
        """Replace an error by its cause if the template does not support calls: its message is about something else."""
        try:
            yield
        except TemplateFault as fault:
            if any(message.tool_calls for message in conversation.messages) and not self.text.takes_calls:
                raise TemplateFault(
                    "the chat template has no place for calls of functions, and this conversation has some: use a "
                    "template that shows calls (--tokenizer_chat_template FILE), or rows without calls"
                ) from fault
            raise

    def _prompt_before(self, conversation: Conversation, number: int) -> str:
        """Return the rollout prompt for message `number`."""
        return self.text.render(conversation.messages[:number], conversation.tools, add_generation_prompt=True)[0]

    def _compared_turns(self, conversation: Conversation, text: str) -> Rendered:
        spans: list[Span] = []
        prompt = None
        num_unthought = 0
        for number, readings in _readings(conversation):
            before = self._prompt_before(conversation, number)
            # Search after the previous turn only, because turns may be equal.
            floor = spans[-1][1] if spans else 0
            for said in readings:
                follows = text.startswith(before)
                direct = turn_at(text, len(before), said.behind(before), self._marks) if follows else None
                span = direct or self._searched_turn(conversation, number, said, text, floor)
                if span is not None:
                    break
            else:
                raise self._fault(conversation, number, text[floor:])
            # A rollout starts from exactly this prompt only if the turn follows it directly.
            prompt = before if direct and direct[0] == len(before) and not spans else prompt
            num_unthought += said is not readings[0]
            spans.append(span)
        return Rendered(text, tuple(spans), prompt, num_unthought)

    def _searched_turn(self, conversation: Conversation, number: int, said: Said, text: str, floor: int) -> Span | None:
        """Locate a turn that does not start right after the generation prompt."""
        before, tools = conversation.messages[:number], conversation.tools
        search = TurnSearch(
            text,
            place_after(before, text, floor),
            said,
            prompt=self.text.render(before, tools, add_generation_prompt=True)[0],
            context=self.text.render(before, tools)[0],
            as_last=self.text.render(conversation.messages[: number + 1], tools)[0],
            previous=before[-1] if before else None,
            marks=self._marks,
            tokenizer=self._tokenizer,
        )
        return search.turn()

    def _end_of_given(self, conversation: Conversation, number: int, prompt: str, text: str) -> int:
        """Return the end of a turn's part that is written by the generation prompt; 0 if unknown."""
        if text.startswith(prompt):
            return len(prompt)
        context = self.text.render(conversation.messages[:number], conversation.tools)[0]
        return end_of_shared_prompt(self._tokenizer, prompt, context, text)

    def _fault(self, conversation: Conversation, number: int, rest: str) -> TemplateFault:
        """Return why no turn in the text has the content of message `number`."""
        message = conversation.messages[number]
        if reason := self._dropped(message, rest):
            return TemplateFault(reason)
        if message.tool_calls and not message.content.strip():
            ends = " or ".join(self._marks.ends)
            return TemplateFault(
                f"the assistant's call of {message.tool_calls[0].name} cannot be told from what the chat template "
                f"writes around it, or does not end with {ends} as other turns do"
            )
        return TemplateFault(f"the chat template leaves out or alters the assistant's text: {message.content[:60]!r}")

    def _dropped(self, message: Message, rest: str) -> str | None:
        """Return an error for a call that ends early, or for calls or reasoning missing in the rest of the text."""
        for call in message.tool_calls:
            written = f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}"
            if end := next((end for end in self._marks.ends if end in written), None):
                return (
                    f"the assistant's call of {call.name} has the control token {end!r} in its name or arguments, "
                    "which would end the turn there: take it out of the row"
                )
        missing = missing_call(rest, message.tool_calls)
        if missing is not None:
            return f"the chat template leaves out or alters the assistant's call of {missing.name}"
        said = Said.without_thought(message)
        # A turn without its reasoning matches, so the template has removed it.
        if said is None or not said.first or not turn_from(rest, 0, said, self._marks):
            return None
        thought = message.reasoning or message.content
        return (
            f"the chat template leaves out the thought of the last turn, {thought[:60]!r}, so it "
            "would not be learned: use a template that keeps it, or rows without thoughts"
        )

    def _refuse_left_out(self, conversation: Conversation, text: str, spans: Sequence[Span]) -> None:
        """Raise TemplateFault if the template omits tools or non-assistant messages."""
        if conversation.tools and not self.text.shows_tools:
            raise TemplateFault("the chat template leaves out the tools of the row: it has no place for them")
        missing = left_out(conversation.messages, text, spans)
        if missing is not None:
            raise TemplateFault(
                f"the chat template leaves out or alters the text of the {missing.role}: {missing.content[:60]!r}"
            )

    def _marked_turns(self, conversation: Conversation, text: str, marked: list[Span]) -> Rendered:
        """Return the generation blocks, from the end of the generation prompt to the end of each turn.

        A template may mark more than a turn's text, such as its header or reasoning, and may use several blocks per
        turn.
        """
        spans: list[Span] = []
        num_unthought = 0
        for number, readings in _readings(conversation):
            prompt = self._prompt_before(conversation, number)
            floor = spans[-1][1] if spans else 0
            # Blocks may also be written around earlier text, such as the header of a turn.
            ahead = (begin for begin, stop in marked if text[max(begin, floor) : stop].strip())
            first = next(ahead, len(text))
            start = max(first, floor, self._end_of_given(conversation, number, prompt, text))
            found = ((said, self._turn_in(text, start, said.behind(text[:start]))) for said in readings)
            said, span = next(((said, span) for said, span in found if span), (None, None))
            if span is None:
                raise self._unmarked(conversation, number, text[start:])
            reach = _reach(marked, span)
            if said is not None and said.calls and missing_call(text[start:reach], said.calls) is None:
                span = (span[0], min(span[1], reach))  # a call is trained only as far as the template marks it
            elif skip_space(text, reach) < span[1]:
                raise TemplateFault(
                    "the chat template's generation block ends before the end-of-turn token "
                    f"{text[reach : span[1]]!r}, so the model would never learn to stop"
                )
            num_unthought += said is not readings[0]
            spans.append((start, span[1]))
        return Rendered(text, tuple(spans), None, num_unthought)

    def _turn_in(self, text: str, start: int, said: Said) -> Span | None:
        """Return the turn at `start`, or later if it contains text, without another end of turn in between."""
        return turn_at(text, start, said, self._marks) or (
            turn_from(text, start, said, self._marks) if said.first else None
        )

    def _unmarked(self, conversation: Conversation, number: int, rest: str) -> TemplateFault:
        """Return why no generation block contains message `number`."""
        if reason := self._dropped(conversation.messages[number], rest):
            return TemplateFault(reason)
        content = conversation.messages[number].content
        if not rest.strip():
            return TemplateFault(f"the chat template has no generation block for the assistant's {content[:60]!r}")
        return TemplateFault(
            f"the chat template's generation block {rest[:60]!r} is not the assistant's text {content[:60]!r} and the "
            "end of turn"
        )


def _reach(marked: Sequence[Span], span: Span) -> int:
    """Return the end of consecutive blocks from the one at the start of `span`. White space may separate blocks."""
    reach = span[0]
    for begin, stop in marked:
        if begin <= reach < stop:
            reach = stop
    return reach


def _no_end(rest: str) -> TemplateFault:
    """Return why a model could not learn to stop, based on the text after a trial answer."""
    if not rest.strip():
        return TemplateFault(
            "the chat template writes no end of turn after the assistant's last text, so the model would never learn "
            "to stop: use a template that ends every turn with a special token (--tokenizer_chat_template FILE); "
            "examples/templates/llava_1_5.jinja is one for LLaVA-1.5"
        )
    return TemplateFault(
        f"the chat template writes no end-of-turn token after the assistant's text ({rest[:30]!r} is no "
        "special token of the tokenizer), so the model would never learn to stop"
    )


def _num_reasoned(conversation: Conversation) -> int:
    """Return the number of messages with separate reasoning."""
    return sum(bool(message.reasoning) for message in conversation.messages)


def _readings(conversation: Conversation) -> list[tuple[int, tuple[Said, ...]]]:
    """Return the number and possible texts of each assistant message: complete, and before the last one also without
    reasoning.
    """
    numbers = [number for number, message in enumerate(conversation.messages) if message.role == "assistant"]
    readings = []
    for number in numbers:
        message = conversation.messages[number]
        unthought = Said.without_thought(message) if number != numbers[-1] else None
        readings.append((number, (Said.by(message), *([unthought] if unthought else []))))
    return readings
