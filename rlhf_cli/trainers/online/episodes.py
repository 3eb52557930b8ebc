"""Episodes of several turns: engines whose response is a whole episode with an environment.

The loop, the algorithms and the packing know nothing of turns: a response is the tokens of all turns with the
observations between them, and `Generation.turns` names the sampled tokens. No token is tokenised twice: the prompt of a
turn is the tokens of all turns before it and the tokens of the observation.

Turns go in step: the engines get one batch for each turn of all episodes, and environments answer meanwhile. So a batch
depends on nothing but seeds and answers, however long an environment takes, and equal runs repeat bit for bit on a CPU.
"""

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rlhf_cli.agents.records import Action, Calls, Environments, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import tool_results
from rlhf_cli.trainers.online.interfaces import Engines

_WAIT_SECONDS = 0.05  # for responses of the engines while replies of environments may come too


class Dialogue(Protocol):
    """Turns as text and tokens, by the chat template of the policy."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens at which a turn ends."""
        ...

    def read(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Return the text and the calls of a sampled turn."""
        ...

    def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens from the end of a sampled turn, whose last token is `last_id`, to the start of the next.

        `conversation` ends with the turn's message.
        """
        ...

    def opened(self, conversation: Conversation, observation: str) -> list[int]:
        """Return the prompt with an observation behind the text of the last message."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The bounds of an episode: turns of the model, and tokens from the prompt's first to the episode's last."""

    max_turns: int
    max_len: int


@dataclass
class _Progress:
    """An episode in the making. Its response ends with the last turn or with the observation after it."""

    request: GenerationRequest
    conversation: Conversation
    num_given: int  # messages of the prompt
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    last_turn: ParsedTurn = field(default_factory=lambda: ParsedTurn("", (), ()))
    finish_reason: Literal["stop", "length"] = "stop"
    num_calls: int = 0
    num_malformed: int = 0
    failure: str | None = None
    version: int = 0
    is_waiting: bool = True  # for its environment
    is_finished: bool = False

    @property
    def num_results(self) -> int:
        """The results of calls so far."""
        return sum(message.role == "tool" for message in self.conversation.messages[self.num_given :])

    @property
    def num_tokens(self) -> int:
        """The tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.token_ids)

    def turn_request(self, max_len: int) -> GenerationRequest:
        """Return the request for the next turn; each turn has a seed of its own."""
        number = len(self.turns)
        seed = self.request.seed if number == 0 else zlib.crc32(f"{self.request.seed} {number}".encode()) & 0x7FFFFFFF
        return replace(
            self.request,
            prompt_ids=self.prompt_ids + self.token_ids,
            seed=seed,
            row=None,
            max_new_tokens=max_len - self.num_tokens,
        )

    def add_turn(self, sampled: Generation, turn: ParsedTurn) -> None:
        """Add a sampled turn."""
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.turns.append((start, len(self.token_ids)))
        self.turn_rewards.append(0.0)
        self.version = sampled.weight_version
        self.last_turn = turn
        self.num_calls += len(turn.calls)
        self.num_malformed += len(turn.faults)
        message = Message("assistant", turn.content, turn.calls)
        self.conversation = replace(self.conversation, messages=(*self.conversation.messages, message))

    def generation(self, own_prompt: list[int]) -> Generation:
        """Return the response; `own_prompt` is the prompt of the row."""
        prompt_ids = None if self.prompt_ids == own_prompt else self.prompt_ids
        facts = Episode(
            tuple(self.turns),
            tuple(self.turn_rewards),
            tuple(map(_plain, self.conversation.messages[self.num_given :])),
            self.failure,
            prompt_ids,
            num_calls=self.num_calls,
            num_malformed=self.num_malformed,
        )
        return Generation(self.token_ids, self.logprobs, self.finish_reason, self.version, facts)


class EpisodeEngines:
    """Rollout engines whose response is an episode: the verbs are those of the engines inside."""

    def __init__(self, engines: Engines, environments: Environments, dialogue: Dialogue, limits: EpisodeLimits) -> None:
        self._engines = engines
        self._environments = environments
        self._dialogue = dialogue
        self._limits = limits
        self._sampling = SamplingParams(0)
        self._episodes: dict[int, _Progress] = {}  # that are not finished
        self._asked: list[int] = []  # the episode of each request of the engines' batch
        self._finished: list[tuple[int, Generation]] = []
        self._max_tokens: int | None = None
        self._num_started = 0  # names of episodes for the environments, of all batches

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one episode per request, in their order."""
        self.begin(requests, sampling)
        found: dict[int, Generation] = {}
        while self.is_generating:
            found |= self.collect()
        return [found[number] for number in range(len(requests))]

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start an episode for each request, whose row its environment gets."""
        self._sampling, self._max_tokens = replace(sampling, end_ids=self._dialogue.end_ids), None
        self._first, self._num_started = self._num_started, self._num_started + len(requests)
        self._episodes = {number: _started(request) for number, request in enumerate(requests)}
        for number, request in enumerate(requests):
            row = json.loads(request.row or "{}")
            self._send(number, Reset(row.get("columns", {}), request.seed))

    @property
    def is_generating(self) -> bool:
        """Whether episodes of the batch are still to come."""
        return bool(self._episodes or self._finished)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return the episodes that finished since the last call, each with the number of its request.

        Waits for one, at most `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._episodes and not self._finished:
            if end is not None and time.monotonic() >= end:
                break
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    def cut(self, max_tokens: int) -> None:
        """Give up the episodes of the batch that have, or get, more tokens in their response."""
        self._max_tokens = max_tokens
        for number in [*self._episodes]:
            self._give_up_if_too_long(number)

    def wake_cache(self) -> None:
        """Be ready to generate."""
        self._engines.wake_cache()

    def sleep(self) -> None:
        """Leave the accelerators to others, and the environments of episodes that were given up."""
        for number in [*self._episodes]:
            self._drop(number)
        self._engines.sleep()

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take the actor's present weights; metrics of the transfer."""
        return self._engines.receive_weights(version)

    def _advance(self) -> None:
        """Wait a moment for turns of the engines and replies of the environments; begin the next turn when all of both
        are there.
        """
        waiting = any(episode.is_waiting for episode in self._episodes.values())
        if self._engines.is_generating:
            for place, sampled in self._engines.collect(_WAIT_SECONDS if waiting else None):
                self._take_turn(self._asked[place], sampled)
            self._take_replies(0.0)
        elif waiting:
            self._take_replies(_WAIT_SECONDS)
        else:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._asked = sorted(self._episodes)
        requests = [self._episodes[number].turn_request(self._limits.max_len) for number in self._asked]
        self._engines.begin(requests, self._sampling)

    def _take_turn(self, number: int, sampled: Generation) -> None:
        episode = self._episodes.get(number)
        if episode is None:
            return  # it was given up
        turn = self._dialogue.read(sampled.token_ids)
        episode.add_turn(sampled, turn)
        if self._give_up_if_too_long(number):
            return
        if sampled.finish_reason == "length":
            self._end(number, "length")
        elif not self._environments.description.tools:
            self._send(number, Text(turn.content))
        elif turn.calls:
            self._send(number, Calls(turn.calls))
        elif turn.faults:
            self._observe(number, ())
        else:
            self._end(number, "stop")

    def _take_replies(self, timeout: float) -> None:
        for name, reply in self._environments.collect(timeout):
            number = name - self._first
            if number in self._episodes:  # else it was given up
                self._take_reply(number, reply)

    def _take_reply(self, number: int, reply: Reply) -> None:
        episode = self._episodes[number]
        episode.is_waiting = False
        if reply.failure is not None:
            episode.failure = reply.failure
            self._finish(number)
        elif episode.is_finished or (reply.is_done and episode.turns):
            _add_reward(episode, reply.reward)
            self._finish(number)
        elif not episode.turns:
            self._open(number, reply)
        else:
            _add_reward(episode, reply.reward)
            self._observe(number, reply.observations)

    def _open(self, number: int, reply: Reply) -> None:
        """Begin the first turn of an episode, whose environment may have added to its prompt."""
        episode = self._episodes[number]
        for observation in reply.observations:
            episode.prompt_ids = self._dialogue.opened(episode.conversation, observation)
        if reply.is_done or episode.num_tokens >= self._limits.max_len:
            why = "was done before the first turn" if reply.is_done else "left no room for a turn within max_len"
            episode.failure = f"{why} (reset)"
            self._finish(number)

    def _observe(self, number: int, observations: Sequence[str]) -> None:
        """Add the answers to a turn, unless the episode is at one of its limits."""
        episode = self._episodes[number]
        if len(episode.turns) == self._limits.max_turns:
            self._end(number, "length")
            return
        messages = self._messages(episode, observations)
        tokens = self._dialogue.between(episode.conversation, messages, last_id=episode.token_ids[-1])
        if episode.num_tokens + len(tokens) >= self._limits.max_len:
            self._end(number, "length")
            return
        episode.token_ids += tokens
        episode.conversation = replace(episode.conversation, messages=(*episode.conversation.messages, *messages))

    def _messages(self, episode: _Progress, observations: Sequence[str]) -> tuple[Message, ...]:
        """Return the answers to a turn: results of its calls and their faults, or the next words of the other side."""
        if not self._environments.description.tools:
            return (Message("user", "\n".join(observations)),)
        turn = episode.last_turn
        results = [(call.name, answer) for call, answer in zip(turn.calls, observations, strict=True)]
        faults = [(None, fault) for fault in turn.faults]
        return tool_results([*results, *faults], first=episode.num_results)

    def _end(self, number: int, reason: Literal["stop", "length"]) -> None:
        """End an episode after a turn; the environment has its last word on the reward."""
        episode = self._episodes[number]
        episode.is_finished, episode.finish_reason = True, reason
        self._send(number, Finish())

    def _finish(self, number: int) -> None:
        episode = self._episodes[number]
        self._drop(number)
        self._finished.append((number, episode.generation(episode.request.prompt_ids)))

    def _send(self, number: int, action: Action) -> None:
        self._episodes[number].is_waiting = True
        self._environments.send(self._first + number, action)

    def _give_up_if_too_long(self, number: int) -> bool:
        is_too_long = self._max_tokens is not None and len(self._episodes[number].token_ids) > self._max_tokens
        if is_too_long:
            self._drop(number)
        return is_too_long

    def _drop(self, number: int) -> None:
        self._environments.end(self._first + number)
        del self._episodes[number]


def _started(request: GenerationRequest) -> _Progress:
    row = json.loads(request.row or "{}")
    asked = row.get("prompt", "")
    listed = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    messages = tuple(Message(message["role"], message["content"]) for message in listed)
    return _Progress(request, Conversation(messages), len(messages), request.prompt_ids)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        plain["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return plain


def _add_reward(episode: _Progress, reward: float) -> None:
    episode.turn_rewards[-1] += reward
