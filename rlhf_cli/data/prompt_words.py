"""Prompt messages: read from rows, reformatted by user code, and extended with the environment's tools."""

from dataclasses import dataclass

from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.data.formats.choosing import prompt_formats
from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.formats.table import PromptFormat
from rlhf_cli.data.formats.tools import TOOLS_COLUMN, with_tools
from rlhf_cli.data.judges import Judges
from rlhf_cli.data.reading.sources import Row, Rows
from rlhf_cli.data.templates.kwargs import KWARGS_COLUMN, template_kwargs_of
from rlhf_cli.data.templates.prompt_templates import FormatPrompt, load_format_prompt


@dataclass(frozen=True, slots=True)
class PromptWords:
    """Reads prompt messages: format per source, `wording` of the text, system prompt, and environment."""

    formats: dict[str, PromptFormat]
    wording: FormatPrompt | None
    system_prompt: str | None
    environment: EnvironmentDescription | None

    def read(self, row: Row) -> Conversation:
        """Return the row's messages."""
        return self.formats[row.source.name].read_prompt(row)

    def asked(self, row: Row, conversation: Conversation) -> Conversation:
        """Return the model's messages. Raises TemplateFault."""
        worded = conversation if self.wording is None else self.wording.applied(conversation)
        if self.environment is None:
            return worded
        if conversation.pictures:
            raise row.error("the row has images, which environments do not support")
        if template_kwargs_of(row):
            raise row.error(f"column {KWARGS_COLUMN!r} is set per row; with an environment, use --{KWARGS_COLUMN}")
        if self.environment.is_program and conversation.tools:
            raise row.error(f"column {TOOLS_COLUMN!r} has tools, but an agent program defines its own: drop the column")
        return with_tools(worded, self.environment.tools, row).with_system_prompt(self.system_prompt)


def words_of(
    config: PromptConfig,
    template: TemplateConfig,
    rows: Rows,
    judges: Judges,
    environment: EnvironmentDescription | None,
) -> PromptWords:
    """Find all sources' formats. Raises UsageError if one is unknown."""
    formats = prompt_formats(config, rows.sources, verifiers=judges.verifiers)
    wording = load_format_prompt(template.format_prompt) if template.format_prompt is not None else None
    return PromptWords(formats, wording, template.system_prompt, environment)
