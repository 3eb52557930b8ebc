"""Chat completion records passed between the agent endpoint and the rollout engines."""

from dataclasses import dataclass
from typing import Literal

from rlhf_cli.data.formats.conversations import Message, Tool, ToolCall

EPISODE_ENDED = "the episode has ended"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for `n` sampled turns after the messages.

    - `max_tokens`: limit per turn; None uses the run's limit.
    - `stop`: a turn also ends at the first of these strings.
    - `identity`: hash that is equal for identical requests, to detect retries.
    - `is_first_try`: the client marked this as a first attempt. If False, the request may be a retry.
    - `logprobs`: return sampled tokens with log-probs.
    - `ignored`: sampling parameters that the request sets and the run ignores.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    identity: str = ""
    is_first_try: bool = False
    logprobs: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled turn with `num_tokens` tokens.

    `tokens` holds the text and log-prob (nats) of each sampled token, if the request set `logprobs`.
    """

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_tokens: int
    tokens: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Response to a request. `prompt_tokens` counts tokens before the sampled turns."""

    choices: tuple[Choice, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens in all choices."""
        return sum(choice.num_tokens for choice in self.choices)


class Refused(Exception):
    """A rejected request. The message is written for the agent's log; other fields follow OpenAI's error format."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
