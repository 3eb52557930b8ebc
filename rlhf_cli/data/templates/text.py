"""Renders chat templates. Trial conversations determine the message format that a template accepts.

Locating the assistant's text is in the other modules of `templates`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_cli.data.formats.conversations import Message, Tool, ToolCall
from rlhf_cli.data.reading.columns import REASONING_KEYS
from rlhf_cli.data.templates.message_forms import MESSAGE_FORMS, MessageForm
from rlhf_cli.data.templates.turn_spans import Span, missing_call
from rlhf_cli.errors import UsageError
from rlhf_cli.models.compat import compiled_template

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TRIAL = (
    Message("user", "first question"),
    Message("assistant", "first answer"),
    Message("user", "second question"),
    Message("assistant", "second answer"),
)
"""Trial conversation to detect the end of a turn. Templates have no reason to change this text."""
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
    Message("assistant", "", (ToolCall("lookup", {"subject": "copper"}, "abcdefghi"),)),
    Message("tool", "found", tool_call_id="abcdefghi", name="lookup"),
    Message("assistant", "first answer"),
)
"""Trial conversation to detect the call format. Mistral's template requires nine-character IDs."""
_TRIAL_THOUGHT = (Message("user", "first question"), Message("assistant", "first answer", reasoning="first thought"))
"""Trial conversation to detect whether reasoning is rendered."""


class TemplateFault(ValueError):
    """Reason why a template cannot be used to train on a conversation."""


class TemplateText:
    """Renders messages with the tokenizer's chat template. Raises UsageError without one.

    `kwargs` are template variables for all renderings, such as Qwen 3's `enable_thinking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise UsageError(
                "the tokenizer has no chat template: give one with --tokenizer_chat_template FILE, "
                "or train on plain text with --no_apply_chat_template and --input_template"
            )
        self._template: str = tokenizer.get_chat_template()
        self._own_variables = {**tokenizer.special_tokens_map, **(kwargs or {})}
        self.marks_turns = _GENERATION_BLOCK.search(self._template) is not None

    def render(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        *,
        add_generation_prompt: bool = False,
        form: MessageForm | None = None,
    ) -> tuple[str, list[Span]]:
        """Render the messages. Returns the text, and the spans of generation blocks (none for a prompt)."""
        form = form or self._form_for(messages)
        variables = {
            **self._own_variables,
            "messages": [form.entry(message) for message in messages],
            # None instead of an empty list: templates test whether tools are defined.
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if self.marks_turns and not add_generation_prompt:
                return self._marked_text(variables)
            return self._text(variables), []
        # Templates raise TypeError for values of unexpected types, such as None as content.
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateFault(f"the chat template does not take this conversation: {error}") from error

    @cached_property
    def reasoning_key(self) -> str | None:
        """Key from which the template reads separate reasoning; None if it reads none."""
        for key in REASONING_KEYS:
            text = self._tried(_TRIAL_THOUGHT, replace(self._plain_form, reasoning_key=key))
            # The key is read if the reasoning appears in the text.
            if text is not None and _TRIAL_THOUGHT[1].reasoning in text:
                return key
        return None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template renders tools."""
        try:
            return self.render(TRIAL[:1], (TRIAL_TOOL,))[0] != self.render(TRIAL[:1], ())[0]
        except TemplateFault:
            return True  # rendering a row raises the actual error

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the template renders a trial conversation with a call, including the function name."""
        called, asked = (self._tried(TRIAL_CALL[:number], self._call_form, (TRIAL_TOOL,)) for number in (2, 1))
        name = TRIAL_CALL[1].tool_calls[0].name
        return called is not None and called.count(name) > (asked or "").count(name)

    @cached_property
    def header(self) -> str:
        """Generation prompt that precedes an assistant turn; "" if unknown."""
        try:
            prompt, context = (self.render(TRIAL[:1], (), add_generation_prompt=add)[0] for add in (True, False))
        except TemplateFault:
            return ""
        return prompt[len(context) :] if prompt.startswith(context) else ""

    def _form_for(self, messages: tuple[Message, ...]) -> MessageForm:
        form = self._call_form if any(message.tool_calls for message in messages) else self._plain_form
        if any(message.reasoning for message in messages):
            form = replace(form, reasoning_key=self.reasoning_key or REASONING_KEYS[0])
        return form

    @cached_property
    def _plain_form(self) -> MessageForm:
        """Format of messages without calls: content as parts if the template reads text only there."""
        plain, parts = MESSAGE_FORMS[0], replace(MESSAGE_FORMS[0], as_parts=True)
        return parts if not self._shows_words(plain) and self._shows_words(parts) else plain

    def _shows_words(self, form: MessageForm) -> bool:
        text = self._tried(TRIAL, form)
        return text is not None and all(message.content in text for message in TRIAL)

    @cached_property
    def _call_form(self) -> MessageForm:
        """Call format accepted by the template, determined by trial: without Python's `None` and `{'subject': ...}` in
        the text.
        """
        forms = [replace(form, as_parts=self._plain_form.as_parts) for form in MESSAGE_FORMS]
        tried = {form: text for form in forms if (text := self._tried(TRIAL_CALL, form, (TRIAL_TOOL,))) is not None}
        # Several forms may be accepted, so take the one with the fewest flaws.
        return min(tried, key=lambda form: _flaws_of_call(tried[form]), default=forms[0])

    def _tried(self, messages: tuple[Message, ...], form: MessageForm, tools: tuple[Tool, ...] = ()) -> str | None:
        """Render trial messages; None if the template rejects them."""
        try:
            return self.render(messages, tools, form=form)[0]
        except TemplateFault:
            return None

    def _marked_text(self, variables: dict[str, object]) -> tuple[str, list[Span]]:
        """Render with transformers. Returns the text, and the spans of generation blocks."""
        given = {name: value for name, value in variables.items() if name != "messages"}
        (text,), (marked,) = render_jinja_template(
            conversations=[variables["messages"]],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **given,
        )
        return text, marked

    def _text(self, variables: dict[str, object]) -> str:
        """Render in a quarter of the time of jinja's `render`, which copies all globals each time. The result equals
        transformers'.
        """
        template = compiled_template(self._template)
        environment = template.environment
        context = environment.context_class(environment, {**self._globals, **variables}, template.name, template.blocks)
        return "".join(template.root_render_func(context))

    @cached_property
    def _globals(self) -> dict[str, object]:
        """Globals available to all templates."""
        return dict(compiled_template(self._template).globals)


def _flaws_of_call(text: str) -> tuple[bool, bool, int]:
    """Rate a trial with a call, lower is better: call missing, Python notation, and number of `None`."""
    absent = missing_call(text, TRIAL_CALL[1].tool_calls) is not None
    return absent, "{'subject'" in text, text.count("None")
