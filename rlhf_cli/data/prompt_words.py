"""The messages of prompts: read from rows, worded by a file of the user, with the tools of the run's environment."""

from dataclasses import dataclass

from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.config.data import PromptConfig
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
    """Reads the messages of rows: the format of each source, the `wording` of their text, the system prompt, and the
    run's environment.
    """

    formats: dict[str, PromptFormat]
    wording: FormatPrompt | None
    system_prompt: str | None
    environment: EnvironmentDescription | None

    def read(self, row: Row) -> Conversation:
        """Return the messages of the row itself."""
        return self.formats[row.source.name].read_prompt(row)

    def asked(self, row: Row, conversation: Conversation) -> Conversation:
        """Return the messages that the model gets. Raise TemplateFault for a fault."""
        worded = conversation if self.wording is None else self.wording.applied(conversation)
        if self.environment is None:
            return worded
        if conversation.pictures:
            raise row.error("the row has pictures, and an environment takes prompts of text")
        if template_kwargs_of(row):
            raise row.error(
                f"column {KWARGS_COLUMN!r} is of this row alone; beside an environment give --{KWARGS_COLUMN}"
            )
        if self.environment.is_program and conversation.tools:
            raise row.error(f"column {TOOLS_COLUMN!r} has tools, and an agent program has its own: drop the column")
        return with_tools(worded, self.environment.tools, row).with_system_prompt(self.system_prompt)


def words_of(
    config: PromptConfig, rows: Rows, judges: Judges, environment: EnvironmentDescription | None
) -> PromptWords:
    """Return the words of all sources. Raise UsageError if a source has no known format."""
    formats = prompt_formats(config, rows.sources, verifiers=judges.verifiers)
    wording = load_format_prompt(config.format_prompt) if config.format_prompt is not None else None
    return PromptWords(formats, wording, config.system_prompt, environment)
