"""Question templates: for the full prompt of base models without chat template, or only for the question text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_cli.data.formats.conversations import MARK, Conversation, Message
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.errors import UsageError

_BUILT_IN = {
    "r1_zero": "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
    "The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
    "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {{ prompt }}\n"
    "Assistant: <think>",
}
"""Built-in templates: Open-Reasoner-Zero (arXiv 2503.24290), derived from DeepSeek-R1-Zero."""

_MARK, _MARK_OF_SYSTEM = "7f3a-question", "7f3a-system"  # unique strings that no template contains


@dataclass(frozen=True)
class _PromptTemplate:
    """A Jinja template with the variables `prompt`, the question text, and `system_prompt`, which may be None.

    `picture_mark` is the model's image placeholder; None for text models.
    """

    template: jinja2.Template
    system_prompt: str | None
    picture_mark: str | None = None

    def prompt(self, conversation: Conversation, row_kwargs: Mapping[str, object] | None = None) -> str:
        """Render the prompt. Raises TemplateFault for more than one question."""
        if row_kwargs:
            raise TemplateFault("chat_template_kwargs need a chat template, and prompt_template takes its place")
        if [message.role for message in conversation.messages] != ["user"] or conversation.tools:
            roles = ", ".join(message.role for message in conversation.messages)
            raise TemplateFault(f"prompt_template takes one question and no tools, not messages of {roles}")
        (question,) = conversation.messages
        text = _rendered(
            self.template, question, "prompt_template", prompt=question.content, system_prompt=self.system_prompt
        )
        return text if self.picture_mark is None or not question.pictures else text.replace(MARK, self.picture_mark)


@dataclass(frozen=True)
class FormatPrompt:
    """A Jinja template that reformats a question's text, `content`, before the chat template renders it."""

    template: jinja2.Template

    def applied(self, conversation: Conversation) -> Conversation:
        """Reformat the last message's text. Raises TemplateFault if that fails."""
        *before, question = conversation.messages
        text = _rendered(self.template, question, "format_prompt", content=question.content)
        return replace(conversation, messages=(*before, replace(question, content=text)))


def _rendered(template: jinja2.Template, question: Message, setting: str, **variables: str | None) -> str:
    """Render a template around a question. Each image of the question must keep exactly one marker."""
    try:
        text = template.render(variables)
    except jinja2.TemplateError as error:
        raise TemplateFault(f"{setting} cannot be rendered: {error}") from error
    if question.pictures and text.count(MARK) != len(question.pictures):
        raise TemplateFault(
            f"{setting} has {text.count(MARK):,} marks for the {len(question.pictures):,} pictures of the question: it "
            "has to take over the whole question once"
        )
    return text


def load_prompt_template(name: str, *, system_prompt: str | None, picture_mark: str | None = None) -> _PromptTemplate:
    """Load a built-in template, or a template file.

    Raises:
        UsageError: the name is unknown, the template is invalid, or it omits the question or a given system prompt.
    """
    path = Path(name).expanduser()
    if name not in _BUILT_IN and not path.is_file():
        raise UsageError(
            f"--prompt_template {name}: there is no such file, nor a built-in one; {', '.join(_BUILT_IN)} is"
        )
    text = _BUILT_IN.get(name) or path.read_text(encoding="utf-8")
    system = None if system_prompt is None else _MARK_OF_SYSTEM
    template = _parsed(f"--prompt_template {name}", text, {"prompt": _MARK, "system_prompt": system})
    return _PromptTemplate(template, system_prompt, picture_mark)


def load_format_prompt(name: str) -> FormatPrompt:
    """Load a template file. Raises UsageError if it does not exist or omits the question."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"--format_prompt {name}: there is no such file")
    return FormatPrompt(
        _parsed(f"--format_prompt {name}", path.read_text(encoding="utf-8").strip(), {"content": _MARK})
    )


def _parsed(setting: str, text: str, variables: Mapping[str, str | None]) -> jinja2.Template:
    """Parse a template. Raises UsageError if it is invalid or omits a variable with a value."""
    # Sandboxed, because template files may come from others. StrictUndefined reports misspelled variables.
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        template = environment.from_string(text)
        shown = template.render(variables)
    except jinja2.TemplateError as error:
        raise UsageError(f"{setting}: {error}") from error
    # Render with unique marks to see whether the template uses its variables.
    for variable, value in variables.items():
        if value is not None and value not in shown:
            raise UsageError(f"{setting} says nothing of {{{{ {variable} }}}}: it would be lost")
    return template
