"""Episodes with an environment in a command: found and checked early, played by the engines of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.mcp_server import McpServer
from rlhf_cli.agents.openenv import OpenEnvServer
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.agents.session_environments import Provider, SessionEnvironments
from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.episodes import MCP_PREFIX, EnvironmentConfig, environment_kind
from rlhf_cli.config.scoring import RequestScoringConfig
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.weight_files import description_of
from rlhf_cli.trainers.online.episodes import EpisodeEngines, EpisodeLimits
from rlhf_cli.trainers.online.interfaces import TurnEngines

OF_ONE_TURN = "is about one response of at most max_new_tokens, and an episode has several turns"
"""End of a sentence about a setting that episodes do not have."""


@dataclass(frozen=True)
class EpisodePlan:
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


def refuse_length_rewards(reward: RequestScoringConfig) -> None:
    """Raise UsageError for a reward by the length of one response."""
    for call in reward.rewards:
        if call.row.kind == "length":
            raise UsageError(f"--reward_funcs {call.name} {OF_ONE_TURN}")


def find_episodes(
    settings: EnvironmentConfig, prompts: PromptConfig, found: FoundModel, tokenizer: Any
) -> EpisodePlan | None:
    """Return the episodes that the settings ask for, None without an environment.

    Raises:
        UsageError: the file or the server is no environment, or the chat template has no place for its observations
            and calls.
    """
    if settings.environment is None:
        return None
    if prompts.prompt_template is not None or not prompts.apply_chat_template:
        given = "--prompt_template" if prompts.prompt_template is not None else "--no_apply_chat_template"
        raise UsageError(f"{given}: turns of an environment need the chat template of the model")
    with _environments(settings) as environments:  # loads the file or asks the server; what it started ends here
        description = environments.description
    dialogue = ChatDialogue(
        Renderer(prompts, tokenizer).template,
        tokenizer,
        description.tools,
        end_ids=eos_token_ids(description_of(found.path)),
        vocab_size=found.architecture.get_text_config().vocab_size,
    )
    return EpisodePlan(settings, prompts, environments, dialogue)


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
