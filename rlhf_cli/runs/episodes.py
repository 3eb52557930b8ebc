"""Episodes in a command: an environment or an agent program is checked early, and played by the engines of the run."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rlhf_cli.agents.agent_programs import AgentPrograms
from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.mcp_server import McpServer
from rlhf_cli.agents.openenv import OpenEnvServer
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.agents.session_environments import Provider, SessionEnvironments
from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.episodes import MCP_PREFIX, EnvironmentConfig, EpisodeConfig, environment_kind
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.data.templates.tool_dialogues import ToolDialogues
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.weight_files import description_of
from rlhf_cli.trainers.online.agent_episodes import AgentEngines
from rlhf_cli.trainers.online.episodes import EpisodeEngines, EpisodeLimits
from rlhf_cli.trainers.online.interfaces import Engines, TurnEngines


class EpisodePlan(Protocol):
    """The episodes of a run, before any engine starts."""

    @property
    def description(self) -> EnvironmentDescription:
        """The facts that prompts need."""
        ...

    def check_rows(self, data: PromptData) -> None:
        """Raise UsageError if the other side needs a column that the first row of a data set does not have."""

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the other side has no room for so many episodes at the same time."""

    def played_by(self, engines: TurnEngines) -> AbstractContextManager[Engines]:
        """Return engines whose responses are episodes, as long as the context lasts."""
        ...


@dataclass(frozen=True)
class EnvironmentPlan:
    """The environment of a run and the dialogue with it, before any engine starts."""

    settings: EnvironmentConfig
    prompts: PromptConfig
    environments: FileEnvironments | SessionEnvironments
    dialogue: ChatDialogue

    @property
    def description(self) -> EnvironmentDescription:
        """The tools of the environment."""
        return self.environments.description

    def check_rows(self, data: PromptData) -> None:
        """Raise UsageError if `reset` of a file needs a column that the first row of a data set does not have.

        A server takes the columns that its `reset` knows; its protocol has no list of them.
        """
        if isinstance(self.environments, FileEnvironments):
            self.environments.check_columns(tuple(data.row_of(data.prompts[0])))

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the server has no room for so many episodes, which a batch plays at the same time."""
        if isinstance(self.environments, SessionEnvironments):
            self.environments.check_sessions(count)

    @contextmanager
    def played_by(self, engines: TurnEngines) -> Iterator[EpisodeEngines]:
        """Yield engines whose responses are episodes, as long as the environments live."""
        limits = EpisodeLimits(self.settings.max_turns, self.prompts.max_len)
        with _environments(self.settings) as environments:
            in_step = self.settings.schedule == "step"
            yield EpisodeEngines(engines, environments, self.dialogue, limits, in_step=in_step)


@dataclass(frozen=True)
class AgentPlan:
    """The agent program of a run and the dialogues with it, before any engine starts."""

    settings: EpisodeConfig
    prompts: PromptConfig
    programs: AgentPrograms
    dialogues: ToolDialogues

    @property
    def description(self) -> EnvironmentDescription:
        """The facts that prompts need."""
        return self.programs.description

    def check_rows(self, data: PromptData) -> None:
        """Do nothing: nobody knows the columns that a program reads."""

    def check_sessions(self, count: int) -> None:
        """Do nothing: episodes wait until a process may start."""

    @contextmanager
    def played_by(self, engines: TurnEngines) -> Iterator[AgentEngines]:
        """Yield engines whose responses are episodes, as long as the programs may run."""
        with self.programs as programs:
            yield AgentEngines(
                engines, programs, self.dialogues, EpisodeLimits(self.settings.max_turns, self.prompts.max_len)
            )


def find_episodes(
    settings: EpisodeConfig, prompts: PromptConfig, found: FoundModel, tokenizer: PreTrainedTokenizerBase
) -> EpisodePlan | None:
    """Return the episodes that the settings ask for, None if a response is a single turn.

    Raises:
        UsageError: the file or the server is no environment, there is no such program, or the chat template has no
            place for further turns.
    """
    if settings.agent_command is None:
        return find_environment(settings, prompts, found, tokenizer)
    _check_template(prompts, "an agent program")
    template = Renderer(prompts, tokenizer).template
    dialogues = ToolDialogues(template, tokenizer, end_ids=_end_ids(found, template), vocab_size=_vocab_size(found))
    programs = AgentPrograms(
        settings.agent_command, timeout=settings.environment_timeout, num_workers=settings.num_workers
    )
    return AgentPlan(settings, prompts, programs, dialogues)


def find_environment(
    settings: EnvironmentConfig, prompts: PromptConfig, found: FoundModel, tokenizer: PreTrainedTokenizerBase
) -> EnvironmentPlan | None:
    """Return the episodes with the environment of the settings, None without one.

    Raises:
        UsageError: the file or the server is no environment, or the chat template has no place for its observations
            and calls.
    """
    if settings.environment is None:
        return None
    _check_template(prompts, "an environment")
    with _environments(settings) as environments:  # loads the file or asks the server; what it started ends here
        description = environments.description
    template = Renderer(prompts, tokenizer).template
    dialogue = ChatDialogue(
        template,
        tokenizer,
        description.tools,
        end_ids=_end_ids(found, template),
        vocab_size=_vocab_size(found),
    )
    return EnvironmentPlan(settings, prompts, environments, dialogue)


def _check_template(prompts: PromptConfig, other: str) -> None:
    """Raise UsageError if prompts are written without the chat template."""
    if prompts.prompt_template is not None or not prompts.apply_chat_template:
        given = "--prompt_template" if prompts.prompt_template is not None else "--no_apply_chat_template"
        raise UsageError(f"{given}: turns of {other} need the chat template of the model")


def _end_ids(found: FoundModel, template: ChatTemplate) -> Sequence[int]:
    """Return the tokens at which a turn ends: those of the model, and the one of the template."""
    return sorted({*eos_token_ids(description_of(found.path)), *template.end_ids})


def _vocab_size(found: FoundModel) -> int:
    """Return the number of the model's embeddings."""
    return int(found.architecture.get_text_config().vocab_size)


def _environments(settings: EnvironmentConfig) -> FileEnvironments | SessionEnvironments:
    """Return the environments of a file, or the sessions with a server, by the form of the setting."""
    source = settings.environment
    assert source is not None
    timeout, num_workers = settings.environment_timeout, settings.num_workers
    provider: Provider
    match environment_kind(source):
        case "file":
            return FileEnvironments(source, timeout=timeout, num_workers=num_workers)
        case "openenv":
            provider = OpenEnvServer(source, timeout=timeout)
        case "mcp":
            provider = McpServer(source.removeprefix(MCP_PREFIX))
    return SessionEnvironments(source, provider, timeout=timeout, num_workers=num_workers)
