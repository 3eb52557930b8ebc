"""Settings for episodes with an environment or agent program."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.queries import HARBOR_PREFIX, TEXTARENA_PREFIX, VERIFIERS_PREFIX
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.scoring import RewardConfig

_OF_EPISODES = Needs("environment", when="plays_episodes")
_HTTP_SCHEMES = ("http", "https")
_URL_SCHEMES = ("ws", "wss", *_HTTP_SCHEMES)
MCP_PREFIX = "mcp:"
NEMO_GYM_PREFIX = "nemo_gym:"

_EnvironmentKind = Literal["file", "openenv", "mcp", "textarena", "nemo_gym", "harbor", "verifiers"]
_TurnSchedule = Literal["step", "free"]


def is_url(text: str) -> bool:
    """Return whether the text is a URL, which refers to a running server."""
    return "://" in text.partition(" ")[0]


def environment_kind(environment: str) -> _EnvironmentKind:
    """Return the environment kind, judged by the form of the setting."""
    if environment.startswith(MCP_PREFIX):
        return "mcp"
    if environment.startswith(TEXTARENA_PREFIX):
        return "textarena"
    if environment.startswith(HARBOR_PREFIX):
        return "harbor"
    if environment.startswith(VERIFIERS_PREFIX):
        return "verifiers"
    if environment.startswith(NEMO_GYM_PREFIX):
        return "nemo_gym"
    return "openenv" if is_url(environment) else "file"


class EpisodeConfig(SettingsGroup):
    """Environment"""

    environment: str | None = None
    """Python file with an environment, or FILE.py:NAME; URL of an OpenEnv server (ws, wss, http, https); "mcp:COMMAND"
    to start an MCP server; mcp:URL for a running MCP server; nemo_gym:URL for a resources server of NeMo Gym;
    textarena:GAME for a game of the package textarena; harbor:docker or harbor:podman for task folders of Harbor; or
    verifiers:NAME for an environment from the verifiers package, run by RLHF_VERIFIERS_PYTHON. Each response becomes a
    multi-turn episode: the class's public methods, or the server's tools, are the model's tools. Without tools,
    step(text) replies to the model.
    """
    max_turns: Annotated[int, _OF_EPISODES] = Field(8, gt=0)
    """Maximum number of model turns per episode. max_new_tokens limits a turn, max_len the full episode."""
    environment_timeout: Annotated[float, _OF_EPISODES] = Field(30.0, gt=0)
    """Timeout in seconds for an environment or agent program to reply; then it is killed. A late tool truncates the
    episode, which keeps its reward so far. A late reset or program fails the episode.
    """

    agent_command: Annotated[str | None, Excludes("environment")] = None
    """Command of an agent program, instead of an environment. Each response is an episode of one process: its requests
    to an OpenAI-compatible endpoint (OPENAI_BASE_URL, OPENAI_API_KEY) are the turns. The program receives the row as
    JSON on standard input, and prints JSON with its reward as the last line.
    """
    environment_num_workers: Annotated[int, _OF_EPISODES] = Field(32, gt=0)
    """Maximum number of concurrent environments or agent processes. Others wait."""
    turn_schedule: Annotated[_TurnSchedule, Needs("environment")] = "step"
    """step samples one turn of all episodes at once, after all environments have replied; results are reproducible on a
    CPU. free samples each turn as soon as its environment replies: faster, but rounding depends on timing.
    """
    turns: Annotated[str | None, _OF_EPISODES] = None
    """File with the model's turns to play, one per line, or FILE.json with a list of strings. Default: type
    the turns in the terminal; without a terminal, each tool is called once with sample arguments.
    """

    @property
    def plays_episodes(self) -> bool:
        """Whether responses are multi-turn episodes."""
        return self.environment is not None or self.agent_command is not None

    @property
    def runs_programs(self) -> bool:
        """Whether external processes request turns: an agent program, or verifiers workers."""
        return self.agent_command is not None or (self.environment or "").startswith(VERIFIERS_PREFIX)

    def identity(self, *, max_len: int) -> dict[str, object]:
        """Return the settings that must match to resume a run.

        A moved folder contains the same file, and a server keeps its path when moved to another host or port.
        """
        # `max_len` limits episodes, so it is part of their identity, unlike for single turns.
        if self.agent_command is not None:
            source = f"agent:{_command_identity(self.agent_command)}"
        elif self.environment is not None:
            source = _identity(self.environment)
        else:
            return {"environment": None, "max_turns": self.max_turns}
        return {"environment": source, "max_turns": self.max_turns, "max_len": max_len}

    @model_validator(mode="after")
    def _check_urls_have_hosts(self) -> Self:
        # Other servers have a prefix, because their URLs look like those of OpenEnv.
        url = (self.environment or "").removeprefix(MCP_PREFIX).removeprefix(NEMO_GYM_PREFIX)
        # A setting of verifiers may be a URL.
        if not is_url(url) or url.startswith(VERIFIERS_PREFIX):
            return self
        schemes: tuple[str, ...] = _URL_SCHEMES
        form = "an OpenEnv server has a URL like ws://host:8000"
        if url != self.environment:
            schemes, form = _HTTP_SCHEMES, "an MCP server has a URL like http://host:8000/mcp"
        if environment_kind(self.environment or "") == "nemo_gym":
            form = "a NeMo Gym server has a URL like http://host:8000"
        parts = urlsplit(url)
        if parts.scheme not in schemes or not parts.hostname:
            raise ValueError(f"environment {self.environment}: {form}")
        return self

    @model_validator(mode="after")
    def _check_turn_schedule(self) -> Self:
        if self.runs_programs and self.turn_schedule == "free":
            raise ValueError(f"turn_schedule free: environment {self.environment} requests turns at any time already")
        return self

    @model_validator(mode="after")
    def _check_agent_command(self) -> Self:
        if self.agent_command is None:
            return self
        try:
            # Only split here; the program is found when it starts.
            words = shlex.split(self.agent_command)
        except ValueError as error:
            raise ValueError(f"agent_command {self.agent_command}: {error}") from None
        if not words:
            raise ValueError('agent_command is empty: set a command like "python my_agent.py"')
        return self


def _identity(environment: str) -> str:
    match environment_kind(environment):
        case "openenv":
            # Clients add /ws themselves, so both forms mean the same server.
            return f"openenv:{urlsplit(environment).path.rstrip('/').removesuffix('/ws')}"
        case "mcp":
            command = environment.removeprefix(MCP_PREFIX)
            if is_url(command):
                return f"{MCP_PREFIX}{urlsplit(command).path}"
            return MCP_PREFIX + _command_identity(command)
        case "textarena" | "harbor" | "verifiers":
            return environment
        case "nemo_gym":
            return f"{NEMO_GYM_PREFIX}{urlsplit(environment.removeprefix(NEMO_GYM_PREFIX)).path.rstrip('/')}"
        case _:
            return Path(environment).name


def _command_identity(command: str) -> str:
    # Without folders: a moved program is the same one.
    return " ".join(Path(word).name for word in command.split())


def check_environment_reward(episodes: EpisodeConfig, reward: RewardConfig) -> None:
    """Raise ValueError if an environment's reward is used without an environment."""
    if not any(call.name == ENVIRONMENT for call in reward.rewards):
        return
    if not episodes.plays_episodes:
        raise ValueError(f"reward_funcs {ENVIRONMENT} is the reward of an environment: set --environment FILE.py")
    if episodes.environment is not None and environment_kind(episodes.environment) == "mcp":
        raise ValueError(f"reward_funcs {ENVIRONMENT}: an MCP server has tools and no reward; name another reward")
