"""Records between an episode and its environment: actions, replies, and the interface of all environments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_cli.data.formats.conversations import ToolCall


@dataclass(frozen=True, slots=True)
class Reset:
    """Begins an episode. `row` has the columns of the prompt's row; `seed` is the episode's own."""

    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one turn, which are made one after the other."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """The text of one turn, for an environment without tools."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Ends an episode whose last turn asks nothing of the environment; the reply has the rest of the reward."""


Action = Reset | Calls | Text | Finish


def method_names(action: Action) -> str:
    """Return the methods of an environment that an action calls, for messages."""
    match action:
        case Reset():
            return "reset"
        case Calls(calls):
            return ", ".join(dict.fromkeys(call.name for call in calls))
        case Text():
            return "step"
        case Finish():
            return "get_reward"


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's answer to an action.

    `observations` are the results of `Calls` in their order, the observation after `Text` or `Reset` if there is one,
    nothing after `Finish`. `reward` is the part of the episode's reward that this action added. After `is_done` the
    episode has ended, at a limit of the environment if it `is_truncated`. `failure` completes a sentence about an
    environment that broke, ran out of time (`is_late`) or ended its process: it answers no further action. `trace` is
    the traceback of an error in the user's code that broke it. The last reply of an episode `lacks_reward` if the
    environment has had none at all, which is not a reward of 0.
    """

    observations: tuple[str, ...] = ()
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False
    failure: str | None = None
    is_late: bool = False
    trace: str = ""
    lacks_reward: bool = False


def late_reply(seconds: float, methods: str) -> Reply:
    """Return the reply in the place of one that did not come within so many seconds."""
    return Reply(failure=f"ran out of time ({seconds:g} s) in {methods}", is_late=True)


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """The facts about an environment that rendering needs.

    `tools` are JSON schemas in OpenAI's form, {"type": "function", "function": {...}}. An environment without tools
    reads the text of turns. `about` is a line for the start of a run. With `rewards_at_end` nothing is known of the
    reward before the episode ends, as with `get_reward`. An agent program (`is_program`) has its
    tools for itself. Without `has_rewards` its kind never gives one.
    """

    tools: tuple[dict[str, Any], ...]
    about: str
    rewards_at_end: bool = False
    is_program: bool = False
    has_rewards: bool = True


class Environments(Protocol):
    """All environments of a run: one object an episode, each with at most one action on its way."""

    @property
    def description(self) -> EnvironmentDescription: ...

    def send(self, episode: int, action: Action) -> None:
        """Give the environment of that episode an action; `Reset` makes the object first."""

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return the replies since the last call, each with its episode. Wait for one, at most `timeout` seconds."""
        ...

    def end(self, episode: int) -> None:
        """Drop the environment of that episode, whatever it does."""
