"""Multi-turn episodes in a command: early checks of the environment or agent program, and the episode engines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rlhf_cli.agents.agent_programs import AgentPrograms, Programs
from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.mcp_server import McpServer
from rlhf_cli.agents.nemo_gym import NemoGymServer
from rlhf_cli.agents.openenv import OpenEnvServer
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.agents.session_environments import Provider, SessionEnvironments
from rlhf_cli.agents.verifiers import VerifiersPrograms
from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import MCP_PREFIX, NEMO_GYM_PREFIX, EpisodeConfig, environment_kind
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.data.reading.sources import first_rows
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.data.templates.tool_dialogues import ToolDialogues
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.weight_files import description_of
from rlhf_cli.trainers.online.environment_player import EnvironmentPlayer
from rlhf_cli.trainers.online.interfaces import Engines, TurnEngines
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, MultiTurnEngines
from rlhf_cli.trainers.online.program_player import ProgramPlayer


class EpisodePlan(Protocol):
    """A run's episodes before engines start."""

    @property
    def description(self) -> EnvironmentDescription:
        """Properties that prompt loading needs."""
        ...

    def check_rows(self, data: PromptData) -> None:
        """Raise UsageError if the environment requires a column that the first row does not have."""

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the environment does not support `count` concurrent episodes."""

    def played_by(self, engines: TurnEngines) -> AbstractContextManager[Engines]:
        """Return a context manager that yields engines with complete episodes as responses."""
        ...


@dataclass(frozen=True)
class EnvironmentPlan:
    """A run's environment and dialogue format before engines start."""

    settings: EpisodeConfig
    prompts: PromptConfig
    environments: FileEnvironments | SessionEnvironments
    dialogue: ChatDialogue

    @property
    def description(self) -> EnvironmentDescription:
        """Properties of the environment, such as tools."""
        return self.environments.description

    def check_rows(self, data: PromptData) -> None:
        """Raise UsageError if `reset` in a file requires a column that the first row does not have."""
        # Servers cannot be checked: the protocol has no list of columns.
        if isinstance(self.environments, FileEnvironments):
            self.environments.check_columns(tuple(data.row_of(data.prompts[0])))

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the server does not support `count` concurrent episodes."""
        if isinstance(self.environments, SessionEnvironments):
            self.environments.check_sessions(count)

    @contextmanager
    def played_by(self, engines: TurnEngines) -> Iterator[MultiTurnEngines]:
        """Start the environments, and yield engines with complete episodes as responses."""
        limits = EpisodeLimits(self.settings.max_turns, self.prompts.max_len)
        # Start new environments per run: those used to read the description have ended.
        with _environments(self.settings, self.prompts) as environments:
            player = EnvironmentPlayer(environments, self.dialogue, limits)
            yield MultiTurnEngines(engines, player, in_step=self.settings.turn_schedule == "step")


@dataclass(frozen=True)
class _AgentPlan:
    """A run's agent programs and dialogue formats before engines start."""

    settings: EpisodeConfig
    prompts: PromptConfig
    programs: Programs
    dialogues: ToolDialogues

    @property
    def description(self) -> EnvironmentDescription:
        """Properties that prompt loading needs."""
        return self.programs.description

    def check_rows(self, data: PromptData) -> None:
        """No-op: the columns that a program reads are unknown."""

    def check_sessions(self, count: int) -> None:
        """No-op: episodes wait until a process is available."""

    @contextmanager
    def played_by(self, engines: TurnEngines) -> Iterator[MultiTurnEngines]:
        """Start the program server, and yield engines with complete episodes as responses."""
        limits = EpisodeLimits(self.settings.max_turns, self.prompts.max_len)
        with self.programs as programs:
            yield MultiTurnEngines(engines, ProgramPlayer(programs, self.dialogues, limits), in_step=False)


def find_episodes(
    settings: EpisodeConfig,
    prompts: PromptConfig,
    template: TemplateConfig,
    found: FoundModel,
    tokenizer: PreTrainedTokenizerBase,
) -> EpisodePlan | None:
    """Return the plan for multi-turn episodes, or None for single-turn responses.

    Raises:
        UsageError: the environment or program is invalid, or the chat template does not support multiple turns.
    """
    if not settings.runs_programs:
        return find_environment(settings, prompts, template, found, tokenizer)
    _check_template(template, "an agent program")
    chat_template = Renderer(template, tokenizer).template
    dialogues = ToolDialogues(
        chat_template, tokenizer, end_ids=_end_ids(found, chat_template), vocab_size=_vocab_size(found)
    )
    return _AgentPlan(settings, prompts, _programs(settings), dialogues)


def find_environment(
    settings: EpisodeConfig,
    prompts: PromptConfig,
    template: TemplateConfig,
    found: FoundModel,
    tokenizer: PreTrainedTokenizerBase,
) -> EnvironmentPlan | None:
    """Return the plan for episodes with an environment, or None without one.

    Raises:
        UsageError: the environment is invalid, or the chat template does not support the observations or tool calls.
    """
    if settings.environment is None:
        return None
    if settings.runs_programs:
        raise UsageError(
            f"--environment {settings.environment}: its episodes cannot be played without a model; its tasks are shown "
            f"without --environment, and samples of a model by rlhf generate"
        )
    _check_template(template, "an environment")
    # Load the file or connect to the server only to read the description. All processes end with this block.
    with _environments(settings, prompts) as environments:
        description = environments.description
    chat_template = Renderer(template, tokenizer).template
    dialogue = ChatDialogue(
        chat_template,
        tokenizer,
        description.tools,
        end_ids=_end_ids(found, chat_template),
        vocab_size=_vocab_size(found),
    )
    return EnvironmentPlan(settings, prompts, environments, dialogue)


def _programs(settings: EpisodeConfig) -> Programs:
    """Create the agent programs, or the workers of verifiers."""
    timeout, num_workers = settings.environment_timeout, settings.environment_num_workers
    if settings.agent_command is not None:
        return AgentPrograms(settings.agent_command, timeout=timeout, num_workers=num_workers)
    assert settings.environment is not None
    return VerifiersPrograms(settings.environment, timeout=timeout, num_workers=num_workers)


def _check_template(template: TemplateConfig, other: str) -> None:
    """Raise UsageError if prompts do not use the chat template."""
    if template.prompt_template is not None or not template.apply_chat_template:
        given = "--prompt_template" if template.prompt_template is not None else "--no_apply_chat_template"
        raise UsageError(f"{given}: {other} requires the model's chat template")


def _end_ids(found: FoundModel, template: ChatTemplate) -> Sequence[int]:
    """Return the tokens that end a turn: the model's EOS tokens and the chat template's."""
    # Sort the set, because the order must not depend on hashing.
    return sorted({*eos_token_ids(description_of(found.path)), *template.end_ids})


def _vocab_size(found: FoundModel) -> int:
    """Return the model's vocabulary size, which may exceed the tokenizer's."""
    return int(found.architecture.get_text_config().vocab_size)


def _environments(settings: EpisodeConfig, prompts: PromptConfig) -> FileEnvironments | SessionEnvironments:
    """Create environments from a file, or sessions with a server, depending on the setting's form."""
    source = settings.environment
    assert source is not None
    timeout, num_workers = settings.environment_timeout, settings.environment_num_workers
    provider: Provider
    match environment_kind(source):
        case "file" | "textarena" | "harbor":
            return FileEnvironments(source, timeout=timeout, num_workers=num_workers)
        case "openenv":
            provider = OpenEnvServer(source, timeout=timeout)
        case "mcp":
            provider = McpServer(source.removeprefix(MCP_PREFIX))
        case "nemo_gym":
            provider = NemoGymServer(source.removeprefix(NEMO_GYM_PREFIX), _first_row(prompts))
    return SessionEnvironments(source, provider, timeout=timeout, num_workers=num_workers)


def _first_row(prompts: PromptConfig) -> Mapping[str, object]:
    """Return the first row of the prompts, {} if they are not in local files."""
    sources = first_rows(prompts.prompt_data, split=prompts.prompt_split, data_format=prompts.data_format)
    return sources[0].row(0) if sources else {}
