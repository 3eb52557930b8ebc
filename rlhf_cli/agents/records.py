"""Actions, replies and the interface shared by all environments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_cli.data.formats.conversations import ToolCall


@dataclass(frozen=True, slots=True)
class Reset:
    """Begin an episode. `row` holds the columns from the prompt's row."""

    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls in one turn, to run one after another. `text` is the rest of the turn."""

    calls: tuple[ToolCall, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one turn, for an environment without tools."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End an episode after a turn without an action; `text` is that turn. The reply holds the remaining reward."""

    text: str = ""


Action = Reset | Calls | Text | Finish


def method_names(action: Action) -> str:
    """Return the environment methods that an action calls, for messages."""
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
    """Response to an action.

    - `observations`: one per call for `Calls`, at most one for `Text` and `Reset`, none for `Finish`.
    - `reward`: the part of the episode reward that this action added.
    - `is_done`: the episode has ended. `is_truncated`: it ended at a limit in the environment.
    - `failure`: completes a sentence about an environment that raised, timed out (`is_late`) or exited. It accepts no
      further action.
    - `trace`: traceback of the user's code, if it raised.
    - `lacks_reward`: in the last reply of an episode, the environment never had a reward, which differs from 0.

    Example: a model submits a correct answer with a tool call, and the tool sets `done` and `reward`. The reply is
    `Reply(("done",), reward=1.0, is_done=True)`.
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
    """Build the reply for an action that timed out."""
    return Reply(failure=f"ran out of time ({seconds:g} s) in {methods}", is_late=True)


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """What prompt rendering needs to know about an environment.

    - `tools`: JSON schemas in OpenAI format, {"type": "function", "function": {...}}. An environment without tools
      reads the text of turns.
    - `about`: a line for the startup log.
    - `rewards_at_end`: no reward is known before the episode ends, as with `get_reward`.
    - `is_program`: an agent program, which declares tools in the requests.
    - `has_rewards`: False for kinds of environments that never have a reward.
    """

    tools: tuple[dict[str, Any], ...]
    about: str
    rewards_at_end: bool = False
    is_program: bool = False
    has_rewards: bool = True


class Environments(Protocol):
    """All environments in a run: one per episode, each with at most one pending action."""

    @property
    def description(self) -> EnvironmentDescription: ...

    async def answer(self, episode: int, action: Action) -> Reply:
        """Send an action to an episode's environment, and wait for the reply. `Reset` creates the environment."""
        ...

    def end(self, episode: int) -> None:
        """Drop an episode's environment, even during an action."""
