"""Templates that make the whole text of a prompt from a question, for base models that know no chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.errors import UsageError

BUILT_IN = {
    "r1_zero": "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
    "The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
    "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {{ prompt }}\n"
    "Assistant: <think>",
}
"""By name: the template of Open-Reasoner-Zero (arXiv 2503.24290), after DeepSeek-R1-Zero's."""

_MARK, _MARK_OF_SYSTEM = "7f3a-question", "7f3a-system"  # words that no template has


@dataclass(frozen=True)
class PromptTemplate:
    """A Jinja template that knows `prompt`, the question's text, and `system_prompt`, which may be None."""

    template: jinja2.Template
    system_prompt: str | None

    def prompt(self, conversation: Conversation, row_kwargs: Mapping[str, object] | None = None) -> str:
        """Return the text that generation starts from. Raise TemplateFault for more than one question."""
        if row_kwargs:
            raise TemplateFault("chat_template_kwargs need a chat template, and prompt_template takes its place")
        if [message.role for message in conversation.messages] != ["user"] or conversation.tools:
            roles = ", ".join(message.role for message in conversation.messages)
            raise TemplateFault(f"prompt_template takes one question and no tools, not messages of {roles}")
        if conversation.pictures:
            raise TemplateFault("prompt_template takes the place of the chat template, which pictures need")
        try:
            return self.template.render(prompt=conversation.messages[0].content, system_prompt=self.system_prompt)
        except jinja2.TemplateError as error:
            raise TemplateFault(f"prompt_template cannot be rendered: {error}") from error


def load_prompt_template(name: str, *, system_prompt: str | None) -> PromptTemplate:
    """Return the built-in template of that name, or the template in a file.

    Raises:
        UsageError: the name is neither, is no template, or drops the question or a given system prompt.
    """
    path = Path(name).expanduser()
    if name not in BUILT_IN and not path.is_file():
        raise UsageError(
            f"--prompt_template {name}: there is no such file, nor a built-in one; {', '.join(BUILT_IN)} is"
        )
    text = BUILT_IN.get(name) or path.read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        template = PromptTemplate(environment.from_string(text), system_prompt)
        shown = template.template.render(prompt=_MARK, system_prompt=_MARK_OF_SYSTEM)
    except jinja2.TemplateError as error:
        raise UsageError(f"--prompt_template {name}: {error}") from error
    for mark, variable in ((_MARK, "prompt"), (_MARK_OF_SYSTEM, "system_prompt")):
        if mark not in shown and (variable == "prompt" or system_prompt is not None):
            raise UsageError(f"--prompt_template {name} says nothing of {{{{ {variable} }}}}: it would be lost")
    return template
