"""Fake environments and dialogues without processes and templates: tokens are characters."""

from collections.abc import Callable, Sequence

from rlhf_cli.agents.records import Action, EnvironmentDescription, Reply, Reset
from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.templates.tool_calls import ParsedTurn

TOOLS = ({"type": "function", "function": {"name": "look", "description": "look", "parameters": {}}},)
SEPARATOR = 10
"""Token before each observation."""


class FakeEnvironments:
    """Replies with a function of episode, turn and action; `order` sorts the replies, by default as sent."""

    def __init__(self, answer: Callable[[int, int, Action], Reply], *, tools: bool = False) -> None:
        self.description = EnvironmentDescription(TOOLS if tools else (), "a fake")
        self._answer = answer
        self._turn: dict[int, int] = {}
        self._replies: list[tuple[int, Reply]] = []
        self.actions: list[tuple[int, Action]] = []
        self.open: set[int] = set()
        self.latest_first = False

    def send(self, episode: int, action: Action) -> None:
        self.actions.append((episode, action))
        if isinstance(action, Reset):
            self.open.add(episode)
        self._turn[episode] = self._turn.get(episode, -1) + 1
        self._replies.append((episode, self._answer(episode, self._turn[episode], action)))

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        if not self._replies:
            return []
        return [self._replies.pop(-1 if self.latest_first else 0)]

    def end(self, episode: int) -> None:
        self.open.discard(episode)


class FakeDialogue:
    """A turn's text is its characters; `c` calls the tool, `n` an unknown one, and `x` is malformed."""

    end_ids: tuple[int, ...] = (0,)

    def read(self, token_ids: Sequence[int], *, behind: Sequence[int] | None = None) -> ParsedTurn:
        text = "".join(map(chr, token_ids))
        calls = [ToolCall("look", {"at": i}) for i in range(text.count("c"))]
        calls += [ToolCall("none", {})] if text == "n" else []
        return ParsedTurn(text, tuple(calls), ("unreadable",) * text.count("x"))

    def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        return [token for observation in observations for token in [SEPARATOR, *map(ord, observation.content)]]

    def opened(self, conversation: Conversation, observation: str) -> list[int]:
        return [*map(ord, conversation.messages[-1].content), *map(ord, observation)]
