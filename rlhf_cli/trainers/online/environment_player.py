"""Episodes with an environment: it answers each turn of the policy until it or a limit ends the episode."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rlhf_cli.agents.records import Action, Calls, Environments, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import Conversation, Message, message_of
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import tool_results
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, SampleTurn
from rlhf_cli.trainers.online.turn_tree import TurnTree, entries, turn_seed

_SHORTENED = " [shortened]"


class Dialogue(Protocol):
    """Turns as text and tokens in the policy's chat template."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End-of-turn tokens."""
        ...

    def read(self, token_ids: Sequence[int], *, behind: Sequence[int] | None = None) -> ParsedTurn:
        """Parse text and calls of a sampled turn that follows `behind`, by default a prompt."""
        ...

    def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens between a sampled turn with last token `last_id` and the next turn.

        `conversation` ends with the turn's message.
        """
        ...

    def opened(self, conversation: Conversation, observation: str) -> list[int]:
        """Return the prompt with an observation appended to the last message."""
        ...


@dataclass
class _Episode:
    """An episode in progress: a tree of turns with one branch, and the tokens since its last turn."""

    request: GenerationRequest
    conversation: Conversation
    num_given: int  # number of prompt messages
    prompt_ids: list[int]
    given_ids: list[int]
    tree: TurnTree = field(default_factory=TurnTree)
    opening: str = ""  # environment text at the end of the prompt
    opening_reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    last_turn: ParsedTurn = field(default_factory=lambda: ParsedTurn("", (), ()))
    finish_reason: Literal["stop", "length"] = "stop"
    failure: str | None = None
    trace: str = ""
    cut: str = ""
    is_over: bool = False
    lacks_reward: bool = False

    @property
    def num_results(self) -> int:
        """Number of call results so far."""
        return sum(message.role == "tool" for message in self.conversation.messages[self.num_given :])

    @property
    def all_ids(self) -> list[int]:
        """Prompt and response token IDs."""
        turns = self.tree.turns
        return self.tree.token_ids(len(turns) - 1) + self.given_ids if turns else self.given_ids

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.given_ids) + (self.tree.turns[-1].length if self.tree.turns else 0)

    @property
    def num_response(self) -> int:
        """Number of response tokens, including an observation."""
        return self.num_tokens - len(self.prompt_ids)

    def open(self, opening: str, prompt_ids: list[int]) -> None:
        """Append an observation to the last prompt message. `prompt_ids` are the new prompt tokens."""
        *before, last = self.conversation.messages
        self.opening, self.prompt_ids, self.given_ids = opening, prompt_ids, prompt_ids
        messages = (*before, replace(last, content=last.content + opening))
        self.conversation = replace(self.conversation, messages=messages)

    def turn_request(self, name: int, max_len: int) -> GenerationRequest:
        """Return the request for the next turn, with a separate seed per turn. `name` is the episode's name."""
        return replace(
            self.request,
            prompt_ids=self.all_ids,
            seed=turn_seed(self.request.seed, len(self.tree.turns)),
            row=None,
            episode=name,
            max_new_tokens=max_len - self.num_tokens,
        )

    def add_turn(self, sampled: Generation, turn: ParsedTurn) -> ParsedTurn:
        """Add a sampled turn. Returns it with call IDs, which identify the results."""
        # Call IDs continue over turns, since some templates match results to calls by ID.
        first, messages, turns = self.num_results, self.conversation.messages, self.tree.turns
        parent = len(turns) - 1 if turns else None
        message = self.tree.add(parent, self.given_ids, sampled, turn, messages, first_call=first)
        # Add the reward of `reset` to the first turn, because only sampled tokens have rewards.
        self.turn_rewards.append(self.opening_reward if parent is None else 0.0)
        self.last_turn = replace(turn, calls=message.tool_calls)
        self.add_observation([], (message,))
        return self.last_turn

    def add_observation(self, token_ids: list[int], messages: Sequence[Message]) -> None:
        """Add tokens and messages after the last turn."""
        self.given_ids = token_ids
        self.conversation = replace(self.conversation, messages=(*self.conversation.messages, *messages))

    def generation(self) -> Generation:
        """Return the response."""
        facts = Episode(
            (),
            tuple(self.turn_rewards),
            entries(self.conversation.messages[self.num_given :]),
            self.failure,
            self.prompt_ids if self.opening else None,
            self.opening,
            trace=self.trace,
            cut=self.cut,
            lacks_reward=self.lacks_reward,
        )
        return self.tree.generation(facts, self.finish_reason)


class EnvironmentPlayer:
    """Plays episodes with environments."""

    def __init__(self, environments: Environments, dialogue: Dialogue, limits: EpisodeLimits) -> None:
        self._environments = environments
        self._dialogue = dialogue
        self._limits = limits
        self._episodes: dict[int, _Episode] = {}  # by name, while they are played
        self._tools = {tool["function"]["name"] for tool in environments.description.tools}

    async def play(
        self, episode: int, request: GenerationRequest, sampling: SamplingParams, sample: SampleTurn
    ) -> Generation:
        """Play an episode. The environment gets the columns of the request's row."""
        row = json.loads(request.row or "{}")
        played = self._episodes[episode] = _begun(request, row)
        sampling = replace(sampling, end_ids=self._dialogue.end_ids)
        action: Action | None = Reset(row.get("columns", {}), request.environment_seed)
        try:
            while not played.is_over:
                if action is not None:
                    reply = await self._environments.answer(episode, action)
                    action = self._take_reply(played, action, reply)
                else:
                    turn_request = played.turn_request(episode, self._limits.max_len)
                    action = self._take_turn(played, await sample(turn_request, sampling))
            return played.generation()
        finally:
            self._environments.end(episode)
            del self._episodes[episode]

    def length(self, episode: int) -> int:
        """Return the number of response tokens so far."""
        return self._episodes[episode].num_response if episode in self._episodes else 0

    def is_busy(self, episode: int) -> bool:
        """Return True: an episode that waits for no turn waits for its environment."""
        return True

    def _take_turn(self, episode: _Episode, sampled: Generation) -> Action | None:
        """Add a turn. Returns the action for the environment; None if it gets none before the next turn."""
        turn = episode.add_turn(sampled, self._dialogue.read(sampled.token_ids, behind=episode.all_ids))
        # A truncated turn is incomplete text, which must not reach the environment as an action.
        if sampled.finish_reason == "length":
            return _finish(episode, "length", turn.content)
        if not self._tools:
            return Text(turn.content)
        if turn.calls:
            return Calls(turn.calls, turn.content)
        # No call could be parsed: the model sees the faults as results and may correct them.
        return self._observe(episode, ()) if turn.faults else _finish(episode, "stop", turn.content)

    def _take_reply(self, episode: _Episode, action: Action, reply: Reply) -> Action | None:
        """Add the reply to an action. Returns the next action; None if a turn is next, or the episode is over."""
        # A timed-out reply ends an episode like a length limit if its rewards are known.
        if reply.is_late and self._has_reward_so_far(episode, action):
            episode.finish_reason, episode.cut, episode.is_over = "length", reply.failure or "", True
            return None
        if reply.failure is not None:
            _fail(episode, reply.failure, reply.trace)
            return None
        if isinstance(action, Reset):
            self._open(episode, reply)
            return None
        episode.turn_rewards[-1] += reply.reward
        # The reply to `Finish` carries the final reward even if the environment did not report the end.
        if not (reply.is_done or isinstance(action, Finish)):
            return self._observe(episode, reply.observations)
        if reply.is_truncated:
            episode.finish_reason, episode.cut = "length", "ended it at a limit"
        episode.lacks_reward, episode.is_over = reply.lacks_reward, True
        return None

    def _has_reward_so_far(self, episode: _Episode, action: Action) -> bool:
        """Return whether an episode without a timely reply may end with its current rewards.

        A model can make a tool hang in any turn, but a `step` that hangs in the first turn is an environment bug. A
        final reward is unknown without the environment.
        """
        is_answered = len(episode.tree.turns) > (0 if self._tools else 1)
        return is_answered and not isinstance(action, Finish) and not self._environments.description.rewards_at_end

    def _open(self, episode: _Episode, reply: Reply) -> None:
        """Start an episode's first turn. The environment may have extended the prompt."""
        episode.opening_reward = reply.reward
        opening = self._shortened("".join(reply.observations))
        if opening:
            try:
                episode.open(opening, self._dialogue.opened(episode.conversation, opening))
            except TemplateFault as fault:
                return _fail(episode, f"added to the prompt, and {fault}")
        # A response without a turn has no sampled token to train on.
        if reply.is_done or episode.num_tokens >= self._limits.max_len:
            _fail(episode, "ended before the first turn" if reply.is_done else "left no room for a turn")

    def _observe(self, episode: _Episode, observations: Sequence[str]) -> Action | None:
        """Add the replies to a turn, unless the episode has reached a limit."""
        if len(episode.tree.turns) == self._limits.max_turns:
            return _finish(episode, "length")
        messages = self._messages(episode, observations)
        try:
            last_id = episode.tree.turns[-1].sampled.token_ids[-1]
            tokens = self._dialogue.between(episode.conversation, messages, last_id=last_id)
        except TemplateFault as fault:
            _fail(episode, f"answered, and {fault}")
            return None
        # A prompt of exactly `max_len` tokens leaves no room for a turn.
        if episode.num_tokens + len(tokens) >= self._limits.max_len:
            return _finish(episode, "length")
        episode.add_observation(tokens, messages)
        return None

    def _messages(self, episode: _Episode, observations: Sequence[str]) -> tuple[Message, ...]:
        """Return the replies to a turn: results and errors of its calls, or the next user message."""
        found = [self._shortened(observation) for observation in observations]
        if not self._tools:
            return (Message("user", "\n".join(found)),)
        turn = episode.last_turn
        # A made-up tool name is untrusted model text, which must not become part of the template's markup.
        names = [call.name if call.name in self._tools else None for call in turn.calls]
        results = [*zip(names, found, strict=True), *((None, fault) for fault in turn.faults)]
        return tool_results(results, first=episode.num_results)

    def _shortened(self, observation: str) -> str:
        """Truncate an observation longer than any episode, so that tokenizing it does not block other episodes."""
        most = self._limits.max_characters
        return observation if len(observation) <= most else observation[:most] + _SHORTENED


def _begun(request: GenerationRequest, row: Mapping[str, Any]) -> _Episode:
    """Create the episode for a request with prompt messages in its row."""
    messages = tuple(map(message_of, row.get("messages", [])))
    return _Episode(request, Conversation(messages), len(messages), request.prompt_ids, request.prompt_ids)


def _finish(episode: _Episode, reason: Literal["stop", "length"], text: str = "") -> Action:
    """End an episode after a turn, whose text the environment has not seen. It returns the final reward."""
    episode.finish_reason = reason
    return Finish(text)


def _fail(episode: _Episode, failure: str, trace: str = "") -> None:
    """End an episode after an environment failure."""
    episode.failure, episode.trace, episode.is_over = failure, trace, True
