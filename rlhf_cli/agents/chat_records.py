"""Records of chat completions between the endpoint of agent programs and the engines that answer."""

from dataclasses import dataclass
from typing import Literal

from rlhf_cli.data.formats.conversations import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a program: `n` turns to sample after the messages.

    `max_tokens` bounds each turn, None without a bound of the program's; it ends at the first of the texts `stop` too.
    `identity` is the same for requests that ask for the same. `is_first_try` is true if the client wrote that it has
    not sent the request before; other requests may be repetitions. `logprobs` is true if it asks for the tokens of the
    turns. `ignored` names its settings of sampling.
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
    """One sampled turn of `num_tokens` tokens for the program.

    `tokens` are the text and the log-prob, in nats, of each sampled token, if the request asked for them.
    """

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_tokens: int
    tokens: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request; `prompt_tokens` counts the tokens before the turns."""

    choices: tuple[Choice, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """The sampled tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)


class Refused(Exception):
    """A request is not answered. The message is a sentence for the program's log; the rest is OpenAI's."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
