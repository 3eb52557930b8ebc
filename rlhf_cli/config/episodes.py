"""Settings of episodes with an environment or an agent program."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.scoring import RewardConfig

OF_EPISODES = Needs("environment", when="plays_episodes")
MCP_SCHEMES = ("http", "https")
URL_SCHEMES = ("ws", "wss", *MCP_SCHEMES)
MCP_PREFIX = "mcp:"

EnvironmentKind = Literal["file", "openenv", "mcp"]
TurnSchedule = Literal["step", "free"]


def is_url(text: str) -> bool:
    """Return whether a text names a server that runs already."""
    return "://" in text.partition(" ")[0]


def environment_kind(environment: str) -> EnvironmentKind:
    """Return the kind of an environment, by the form of the setting."""
    if environment.startswith(MCP_PREFIX):
        return "mcp"
    return "openenv" if is_url(environment) else "file"


class EpisodeConfig(SettingsGroup):
    """Environment"""

    environment: str | None = None
    """Python file with an environment, or FILE.py:NAME; the URL of an OpenEnv server (ws, wss, http, https); or
    "mcp:COMMAND", an MCP server that the command starts; or mcp:URL, an MCP server that runs. A response is an episode
    of several turns then: public methods of the class, or the tools of the server, are the model's tools, and
    step(text) answers a model without tools."""
    max_turns: Annotated[int, OF_EPISODES] = Field(8, gt=0)
    """Turns of the model in an episode at most; max_new_tokens bounds a turn, and max_len the whole episode."""
    environment_timeout: Annotated[float, OF_EPISODES] = Field(30.0, gt=0)
    """Seconds in which an environment or an agent program has to answer a turn; then it is killed. A late tool
    truncates its episode, which keeps the reward so far; a late reset or program fails it."""

    agent_command: Annotated[str | None, Excludes("environment")] = None
    """Command of an agent program, instead of an environment. A response is an episode of one process of it: its
    requests to an OpenAI-compatible endpoint (OPENAI_BASE_URL, OPENAI_API_KEY) are the turns, the row is JSON on its
    standard input, and its last line of output is JSON with its reward."""
    environment_num_workers: Annotated[int, OF_EPISODES] = Field(32, gt=0)
    """Environments that work at the same time, or processes of the agent program; the others wait."""
    turn_schedule: Annotated[TurnSchedule, Needs("environment")] = "step"
    """step samples a turn of all episodes at once, when the last environment has answered, and repeats bit for bit on a
    CPU. free samples each turn as soon as its environment has answered: faster, and its rounding depends on timing."""
    turns: Annotated[str | None, OF_EPISODES] = None
    """File with the model's turns in the episode that is played, one a line, or FILE.json with a list of texts. Without
    it a person types them in a terminal, and elsewhere each tool is called once with made-up arguments."""

    @property
    def plays_episodes(self) -> bool:
        """Whether a response is an episode of several turns."""
        return self.environment is not None or self.agent_command is not None

    def identity(self, *, max_len: int) -> dict[str, object]:
        """Return the settings that runs which are one have in common.

        A folder that moved holds the same file, and a server that moved to another host or port has the same path.
        """
        if self.agent_command is not None:
            source = f"agent:{_command_identity(self.agent_command)}"
        elif self.environment is not None:
            source = _identity(self.environment)
        else:
            return {"environment": None, "max_turns": self.max_turns}
        return {"environment": source, "max_turns": self.max_turns, "max_len": max_len}

    @model_validator(mode="after")
    def _a_url_has_a_host(self) -> Self:
        url = (self.environment or "").removeprefix(MCP_PREFIX)
        if not is_url(url):
            return self
        schemes: tuple[str, ...] = URL_SCHEMES
        form = "an OpenEnv server has a URL like ws://host:8000"
        if url != self.environment:
            schemes, form = MCP_SCHEMES, "an MCP server has a URL like http://host:8000/mcp"
        parts = urlsplit(url)
        if parts.scheme not in schemes or not parts.hostname:
            raise ValueError(f"environment {self.environment}: {form}")
        return self

    @model_validator(mode="after")
    def _agent_command_is_one(self) -> Self:
        if self.agent_command is None:
            return self
        try:
            words = shlex.split(self.agent_command)
        except ValueError as error:
            raise ValueError(f"agent_command {self.agent_command}: {error}") from None
        if not words:
            raise ValueError('agent_command is empty: give a command like "python my_agent.py"')
        return self


def _identity(environment: str) -> str:
    match environment_kind(environment):
        case "openenv":
            return f"openenv:{urlsplit(environment).path.rstrip('/').removesuffix('/ws')}"
        case "mcp":
            command = environment.removeprefix(MCP_PREFIX)
            if is_url(command):
                return f"{MCP_PREFIX}{urlsplit(command).path}"
            return MCP_PREFIX + _command_identity(command)
        case _:
            return Path(environment).name


def _command_identity(command: str) -> str:
    return " ".join(Path(word).name for word in command.split())


def check_environment_reward(episodes: EpisodeConfig, reward: RewardConfig) -> None:
    """Raise ValueError if the reward of an environment is named and there is none."""
    if not any(call.name == ENVIRONMENT for call in reward.rewards):
        return
    if not episodes.plays_episodes:
        raise ValueError(f"reward_funcs {ENVIRONMENT} is the reward of an environment: give --environment FILE.py")
    if episodes.environment is not None and environment_kind(episodes.environment) == "mcp":
        raise ValueError(f"reward_funcs {ENVIRONMENT}: an MCP server has tools and no reward; name another reward")
