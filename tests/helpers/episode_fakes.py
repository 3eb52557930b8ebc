"""Fake environments and dialogues without processes and templates: tokens are characters."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_cli.agents.records import Action, EnvironmentDescription, Reply, Reset
from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.trainers.online.environment_player import EnvironmentPlayer
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, MultiTurnEngines

TOOLS = ({"type": "function", "function": {"name": "look", "description": "look", "parameters": {}}},)
SEPARATOR = 10
"""Token before each observation."""


class FakeEnvironments:
    """Replies with a function of episode, turn and action; `order` sorts the replies, by default as sent."""

    def __init__(self, answer: Callable[[int, int, Action], Reply], *, tools: bool = False) -> None:
        self.description = EnvironmentDescription(TOOLS if tools else (), "a fake")
        self._answer = answer
        self._turn: dict[int, int] = {}
        self._waiting: list[tuple[int, asyncio.Future[Reply], Reply]] = []
        self.actions: list[tuple[int, Action]] = []
        self.open: set[int] = set()
        self.latest_first = False

    async def answer(self, episode: int, action: Action) -> Reply:
        self.actions.append((episode, action))
        if isinstance(action, Reset):
            self.open.add(episode)
        self._turn[episode] = self._turn.get(episode, -1) + 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, future, self._answer(episode, self._turn[episode], action)))
        asyncio.get_running_loop().call_soon(self._reply)
        return await future

    def _reply(self) -> None:
        """Send a reply. Called once for each action."""
        _, future, reply = self._waiting.pop(-1 if self.latest_first else 0)
        if not future.done():  # cancelled with its episode
            future.set_result(reply)

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


def episode_engines(
    engines: Any, environments: Any, *, dialogue: Any = None, max_turns: int, max_len: int, in_step: bool = True
) -> MultiTurnEngines:
    """Return engines whose responses are episodes with these environments."""
    player = EnvironmentPlayer(environments, dialogue or FakeDialogue(), EpisodeLimits(max_turns, max_len))
    return MultiTurnEngines(engines, player, in_step=in_step)
