"""Chat templates: conversations as text, and which characters of that text the assistant wrote.

Nothing is tokenised here but a trial conversation, which shows what the template ends a turn with. A template whose
assistant turns cannot be told apart from what it writes around them is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from rlhf_cli.data.columns import REASONING_KEYS
from rlhf_cli.data.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.message_forms import MESSAGE_FORMS, MessageForm
from rlhf_cli.data.turns import (
    Said,
    Span,
    left_out,
    missing_call,
    num_shared,
    place_after,
    skip_space,
    turn_at,
    turn_from,
)
from rlhf_cli.errors import UsageError

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TRIAL = (
    Message("user", "first question"),
    Message("assistant", "first answer"),
    Message("user", "second question"),
    Message("assistant", "second answer"),
)
"""Rendered once to learn how the template ends a turn; no template has a reason to alter these words."""
TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "look up",
        "parameters": {"type": "object", "properties": {"subject": {"type": "string", "description": "a word"}}},
    },
}
TRIAL_CALL = (
    Message("user", "first question"),
    Message("assistant", "", (ToolCall("lookup", {"subject": "word"}, "abcdefghi"),)),
    Message("tool", "found", tool_call_id="abcdefghi", name="lookup"),
    Message("assistant", "first answer"),
)
"""Rendered once to learn how the template takes a call; Mistral's wants an id of nine letters."""
TRIAL_THOUGHT = (Message("user", "first question"), Message("assistant", "first answer", reasoning="first thought"))
"""Rendered once to learn whether the template writes what the assistant thought."""


class TemplateFault(ValueError):
    """Why the template makes it impossible to train on a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. `spans` bound the characters that carry loss: each assistant's text and end of turn.

    `prompt` is what a rollout of the first turn would start from, where the text continues exactly that, else None.
    `num_unthought` counts the turns whose thought the template leaves out, as it does for those before the last,
    `num_inlined` those whose `reasoning` became part of the content.
    """

    text: str
    spans: tuple[Span, ...]
    prompt: str | None
    num_unthought: int = 0
    num_inlined: int = 0


class ChatTemplate:
    """The tokenizer's chat template. Raises UsageError if it has none.

    `kwargs` are variables of the template's own, such as Qwen 3's `enable_thinking`, which every rendering gets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise UsageError(
                "the tokenizer has no chat template: give one with --tokenizer_chat_template FILE, "
                "or train on plain text with --no_apply_chat_template and --input_template"
            )
        self._tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._own_variables = {**tokenizer.special_tokens_map, **(kwargs or {})}
        self._marks_turns = GENERATION_BLOCK.search(self._template) is not None

    @cached_property
    def ends_of_turn(self) -> tuple[str, ...]:
        """The tokens that the template writes after the assistant, as text: after the last turn first, then others.

        Raises TemplateFault if it ends turns with no token of its own.
        """
        text, _ = self._render(TRIAL, ())
        encoding = self._tokenizer(text, add_special_tokens=False)
        ends, runs = [], []
        for answer in (TRIAL[3].content, TRIAL[1].content):
            found = text.find(answer)
            if found < 0:
                raise TemplateFault("the chat template leaves out or alters what the assistant says")
            place = skip_space(text, found + len(answer))
            token = encoding.char_to_token(place) if place < len(text) else None
            added = None if token is None else self._tokenizer.added_tokens_decoder.get(encoding["input_ids"][token])
            if added is None or not text.startswith(added.content, place):
                follows = repr(text[found + len(answer) :][:30]) if place < len(text) else "nothing"
                raise TemplateFault(
                    f"the chat template writes no end-of-turn token after the assistant's text ({follows} is no "
                    "special token of the tokenizer), so the model would never learn to stop"
                )
            ends.append(added.content)
            runs.append(self._special_run(text, place))
        shared = runs[0][: num_shared(*runs)]  # Cohere 2 ends a response, and with it the turn
        return tuple(dict.fromkeys(["".join(shared)] if shared else ends))

    def _special_run(self, text: str, place: int) -> list[str]:
        """Return the special tokens that follow each other directly from `place` on."""
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        run: list[str] = []
        while found := max((token for token in added if text.startswith(token, place)), key=len, default=""):
            run.append(found)
            place += len(found)
        return run

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The tokens that end a turn, and the one that ends a turn of calls, as `<|call|>` of gpt-oss."""
        try:
            text = self._render(TRIAL_CALL[:2], (TRIAL_TOOL,))[0].rstrip()
        except TemplateFault:
            return self.ends_of_turn
        shows_call = missing_call(text, TRIAL_CALL[1].tool_calls) is None
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        ends = [token for token in added if text.endswith(token)] if shows_call else []
        return tuple(dict.fromkeys([*self.ends_of_turn, *ends]))

    @cached_property
    def _call_form(self) -> MessageForm:
        """The form of calls that the template takes, by a trial: without Python's `None` and `{'subject': ...}`."""
        tried: dict[MessageForm, str] = {}
        for form in MESSAGE_FORMS:
            try:
                tried[form] = self._render(TRIAL_CALL, (TRIAL_TOOL,), form=form)[0]
            except TemplateFault:
                continue
        fewest = min((text.count("None") for text in tried.values()), default=0)
        fit = (form for form, text in tried.items() if "{'subject'" not in text and text.count("None") == fewest)
        return next(fit, MESSAGE_FORMS[0])

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes anything of the functions that may be called."""
        try:
            return self._render(TRIAL[:1], (TRIAL_TOOL,))[0] != self._render(TRIAL[:1], ())[0]
        except TemplateFault:
            return True  # rendering the row says what is wrong

    @cached_property
    def _reasoning_key(self) -> str | None:
        """The key under which the template reads a thought apart from the content; None if it reads none."""
        for key in REASONING_KEYS:
            try:
                text, _ = self._render(TRIAL_THOUGHT, (), form=replace(MESSAGE_FORMS[0], reasoning_key=key))
            except TemplateFault:
                continue
            if TRIAL_THOUGHT[1].reasoning in text:
                return key
        return None

    def _readable(self, conversation: Conversation) -> Conversation:
        """The conversation with thoughts where the template finds them: apart from the content, or in it."""
        if not num_reasoned(conversation) or self._reasoning_key is not None:
            return conversation
        return replace(conversation, messages=tuple(m.with_reasoning_in_text() for m in conversation.messages))

    def prompt(self, conversation: Conversation) -> str:
        """Text that the assistant's next turn would continue. Raises TemplateFault if the template refuses it."""
        conversation = self._readable(conversation)
        text, _ = self._render(conversation.messages, conversation.tools, add_generation_prompt=True)
        self._refuse_left_out(conversation, text, ())
        return text

    def example(self, conversation: Conversation) -> Rendered:
        """Text of a whole conversation and the spans of its assistant turns.

        Spans come from the template's `{% generation %}` blocks if it has them, else from comparing the text with
        that of the messages before each turn. Raises TemplateFault where a turn is not in the text as it was given
        (white space around it and thoughts before the last turn aside), or without an end of turn.
        """
        readable = self._readable(conversation)
        if readable is not conversation:
            return replace(self.example(readable), num_inlined=num_reasoned(conversation))
        text, marked = self._render(conversation.messages, conversation.tools)
        if self._marks_turns:
            found = self._marked_turns(conversation, text, marked)
        else:
            found = self._compared_turns(conversation, text)
        self._refuse_left_out(conversation, text, found.spans)
        return found

    def _compared_turns(self, conversation: Conversation, text: str) -> Rendered:
        spans: list[Span] = []
        prompt = None
        num_unthought = 0
        for number, readings in _readings(conversation):
            before = self._render(conversation.messages[:number], conversation.tools, add_generation_prompt=True)[0]
            floor = spans[-1][1] if spans else 0
            for said in readings:
                direct = turn_at(text, len(before), said, self._ends) if text.startswith(before) else None
                span = direct or self._turn_behind(conversation, number, said, text, floor)
                if span is not None:
                    break
            else:
                raise self._fault(conversation, number, text[floor:])
            prompt = before if direct and direct[0] == len(before) and not spans else prompt
            num_unthought += said is not readings[0]
            spans.append(span)
        return Rendered(text, tuple(spans), prompt, num_unthought)

    def _render(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, Any], ...],
        *,
        add_generation_prompt: bool = False,
        form: MessageForm | None = None,
    ) -> tuple[str, list[Span]]:
        """Text, and the spans of its generation blocks (none for a prompt)."""
        if form is None:
            form = self._call_form if any(message.tool_calls for message in messages) else MESSAGE_FORMS[0]
            if any(message.reasoning for message in messages):
                form = replace(form, reasoning_key=self._reasoning_key or REASONING_KEYS[0])
        variables = {
            **self._own_variables,
            "messages": [form.entry(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if self._marks_turns and not add_generation_prompt:
                return self._marked_text(variables)
            return self._text(variables), []
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateFault(f"the chat template does not take this conversation: {error}") from error

    def _marked_text(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """What transformers renders, and the spans of the generation blocks."""
        given = {name: value for name, value in variables.items() if name != "messages"}
        (text,), (marked,) = render_jinja_template(
            conversations=[variables["messages"]],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **given,
        )
        return text, marked

    def _text(self, variables: dict[str, Any]) -> str:
        """What transformers renders, in a quarter of the time: jinja's `render` goes through all globals every time."""
        template = _compile_jinja_template(self._template)  # kept by transformers; vLLM renders with it too
        environment = template.environment
        context = environment.context_class(environment, {**self._globals, **variables}, template.name, template.blocks)
        return "".join(template.root_render_func(context))

    @cached_property
    def _globals(self) -> dict[str, Any]:
        """What every template may use."""
        return dict(_compile_jinja_template(self._template).globals)

    def _turn_behind(self, conversation: Conversation, number: int, said: Said, text: str, floor: int) -> Span | None:
        """Span of a turn before which the template writes more than, or other than, its generation prompt.

        Qwen 3 puts an empty thought there, DeepSeek R1 opens one in the generation prompt alone, and Mistral has the
        tools before the last user turn.
        """
        before, tools = conversation.messages[:number], conversation.tools
        prompt = self._render(before, tools, add_generation_prompt=True)[0]
        context = self._render(before, tools)[0]
        alone = self._render(conversation.messages[: number + 1], tools)[0]
        floor = place_after(before, text, floor)
        found = self._turn_as_last(prompt, alone, said, text, floor)
        if found is None and not said.first:
            return self._calls_behind(prompt, context, said, text)
        return found or self._words_behind(prompt, context, before[-1] if before else None, said, text, floor)

    def _turn_as_last(self, prompt: str, alone: str, said: Said, text: str, floor: int) -> Span | None:
        """Span of the characters that the turn has in `alone`, where it is the last one."""
        span = turn_at(alone, len(prompt), said, self._ends) if alone.startswith(prompt) else None
        place = text.find(alone[slice(*span)], floor) if span else -1
        if span is None or place < 0 or any(end in text[floor:place] for end in self._ends):
            return None
        return place, place + span[1] - span[0]

    def _words_behind(
        self, prompt: str, context: str, previous: Message | None, said: Said, text: str, floor: int
    ) -> Span | None:
        """Span of the words behind what the text shares with the prompt, with the context, or with the context's end.

        The last is for templates that alter earlier turns: Qwen 3.5 leaves out the thoughts before a later question.
        """
        if text.startswith(prompt) and (span := turn_from(text, max(len(prompt), floor), said, self._ends)):
            return self._generated(prompt, context, span, text)
        if span := turn_from(text, max(num_shared(context, text), floor), said, self._ends):
            return self._generated(prompt, context, span, text)
        place = context.rfind(previous.content) if previous and previous.content else -1
        if previous is None or place < 0:
            return None
        behind = num_shared(context[place + len(previous.content) :], text[floor:])
        return turn_from(text, floor + behind, said, self._ends)

    def _generated(self, prompt: str, context: str, span: Span, text: str) -> Span:
        """Extend a turn to all that follows the generation prompt: the model has to generate what is between too.

        gpt-oss names a channel before its words, and Qwen 3 writes an empty thought there.
        """
        if not (text.startswith(context) and prompt.startswith(context)):
            return span
        header = self._num_shared_tokens(prompt[len(context) :], text[len(context) :])
        return (min(len(context) + header, span[0]), span[1]) if header else span

    def _calls_behind(self, prompt: str, context: str, said: Said, text: str) -> Span | None:
        """Span of a turn of calls alone, which has no words to begin with: behind what it shares with the prompt."""
        if not (text.startswith(context) and prompt.startswith(context)):
            return None
        header = self._num_shared_tokens(prompt[len(context) :], text[len(context) :])
        return turn_at(text, len(context) + header, said, self._ends) if header else None

    def _num_shared_tokens(self, first: str, second: str) -> int:
        """Characters of the tokens at the start that two texts have in common."""
        ids = [self._tokenizer(text, add_special_tokens=False) for text in (first, second[: 2 * len(first)])]
        shared = num_shared(ids[0]["input_ids"], ids[1]["input_ids"])
        return ids[0].token_to_chars(shared - 1).end if shared else 0

    def _fault(self, conversation: Conversation, number: int, rest: str) -> TemplateFault:
        """Why there is no turn in the text that says what message `number` does."""
        message = conversation.messages[number]
        call = missing_call(rest, message.tool_calls)
        if call is not None:
            return TemplateFault(f"the chat template leaves out or alters the assistant's call of {call.name}")
        if message.tool_calls and not message.content.strip():
            ends = " or ".join(self._ends)
            return TemplateFault(
                f"the assistant's call of {message.tool_calls[0].name} cannot be told from what the chat template "
                f"writes around it, or does not end with {ends} as other turns do"
            )
        said = Said.without_thought(message)
        if said is not None and said.first and turn_from(rest, 0, said, self._ends):
            thought = message.reasoning or message.content
            return TemplateFault(
                f"the chat template leaves out the thought of the last turn, {thought[:60]!r}, so it "
                "would not be learned: use a template that keeps it, or rows without thoughts"
            )
        return TemplateFault(
            f"the chat template leaves out or alters what the assistant says: {message.content[:60]!r}"
        )

    def _refuse_left_out(self, conversation: Conversation, text: str, spans: Sequence[Span]) -> None:
        """Raises TemplateFault if the template leaves out the tools, or what others than the assistant say."""
        if conversation.tools and not self._shows_tools:
            raise TemplateFault("the chat template leaves out the tools of the row: it has no place for them")
        missing = left_out(conversation.messages, text, spans)
        if missing is not None:
            raise TemplateFault(
                f"the chat template leaves out or alters what the {missing.role} says: {missing.content[:60]!r}"
            )

    def _marked_turns(self, conversation: Conversation, text: str, marked: list[Span]) -> Rendered:
        """The generation blocks, from the end of the generation prompt to the end of each turn.

        A template may mark more than a turn's words, as its header or a thought, and may use several blocks for a turn.
        """
        spans: list[Span] = []
        num_unthought = 0
        for number, readings in _readings(conversation):
            prompt = self._render(conversation.messages[:number], conversation.tools, add_generation_prompt=True)[0]
            floor = spans[-1][1] if spans else 0
            ahead = (begin for begin, stop in marked if begin >= floor or text[floor:stop].strip())
            first = next(ahead, len(text))
            start = max(first, len(prompt)) if text.startswith(prompt) else max(first, floor)
            found = ((said, self._turn_in(text, start, said)) for said in readings)
            said, span = next(((said, span) for said, span in found if span), (None, None))
            if span is None:
                raise self._unmarked(conversation, number, text[start:])
            reach = _reach(marked, span)
            if said is not None and said.calls and missing_call(text[start:reach], said.calls) is None:
                span = (span[0], min(span[1], reach))  # what the template marks of a call is all that is generated
            elif skip_space(text, reach) < span[1]:
                raise TemplateFault(
                    "the chat template's generation block ends before the end-of-turn token "
                    f"{text[reach : span[1]]!r}, so the model would never learn to stop"
                )
            num_unthought += said is not readings[0]
            spans.append((start, span[1]))
        return Rendered(text, tuple(spans), None, num_unthought)

    def _turn_in(self, text: str, start: int, said: Said) -> Span | None:
        """The turn that begins at `start` or, if it has words, somewhere behind without another turn's end between."""
        return turn_at(text, start, said, self._ends) or (
            turn_from(text, start, said, self._ends) if said.first else None
        )

    def _unmarked(self, conversation: Conversation, number: int, rest: str) -> TemplateFault:
        """Why no generation block holds message `number`."""
        content = conversation.messages[number].content
        if not rest.strip():
            return TemplateFault(f"the chat template has no generation block for the assistant's {content[:60]!r}")
        return TemplateFault(
            f"the chat template's generation block {rest[:60]!r} is not the assistant's text {content[:60]!r} and the "
            "end of turn"
        )


def _reach(marked: Sequence[Span], span: Span) -> int:
    """Where the blocks from the one around the start of `span` on end; white space may be between blocks."""
    reach = span[0]
    for begin, stop in marked:
        if begin <= reach < stop:
            reach = stop
    return reach


def num_reasoned(conversation: Conversation) -> int:
    """Messages that have their reasoning apart from the content."""
    return sum(bool(message.reasoning) for message in conversation.messages)


def _readings(conversation: Conversation) -> list[tuple[int, tuple[Said, ...]]]:
    """Number of each assistant message and what may stand for it: all of it, before the last also without thought."""
    numbers = [number for number, message in enumerate(conversation.messages) if message.role == "assistant"]
    readings = []
    for number in numbers:
        message = conversation.messages[number]
        unthought = Said.without_thought(message) if number != numbers[-1] else None
        readings.append((number, (Said.by(message), *([unthought] if unthought else []))))
    return readings
