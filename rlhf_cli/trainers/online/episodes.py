"""Multi-turn episodes: rollout engines whose response is a full episode with an environment.

Loop, algorithms and packing do not depend on turns: a response is the tokens of all turns with the observations between
them, and `Generation.turns` marks sampled tokens. Tokens are never retokenized: a turn's prompt is all previous tokens
plus the observation's tokens.

Synchronized turns (`in_step`): engines sample one batch per turn for all episodes. Batches depend only on seeds and
replies, not on timing, so equal runs are bit-identical on a CPU. Asynchronous turns: an episode's next turn joins the
engines' batch as soon as its environment replies. Turns do not wait for other episodes, but rounding depends on the
turns that share a batch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rlhf_cli.agents.records import Action, Calls, Environments, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import tool_results
from rlhf_cli.trainers.online.episode_progress import EpisodeProgress, begun
from rlhf_cli.trainers.online.interfaces import TurnEngines
from rlhf_cli.trainers.online.multi_turn import CHARACTERS_PER_TOKEN, WAIT_SECONDS, MultiTurnEngines

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


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode: model turns, and total tokens including the prompt."""

    max_turns: int
    max_len: int


class EpisodeEngines(MultiTurnEngines[EpisodeProgress]):
    """Rollout engines with one environment episode per response."""

    def __init__(
        self,
        engines: TurnEngines,
        environments: Environments,
        dialogue: Dialogue,
        limits: EpisodeLimits,
        *,
        in_step: bool = True,
    ) -> None:
        super().__init__(engines, in_step=in_step)
        self._environments = environments
        self._dialogue = dialogue
        self._limits = limits
        self._sampling = SamplingParams(0)
        self._waiting: set[int] = set()  # waiting for their environments
        self._ready: list[int] = []  # ready for the next turn
        self._asked: list[int] = []  # episode per request in the engines' batch
        self._tools = {tool["function"]["name"] for tool in environments.description.tools}

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start an episode for each request. Its environment receives the request's row."""
        # Episodes of a previous batch must not receive replies from this one's environments.
        self._drop_all()
        self._sampling = replace(sampling, end_ids=self._dialogue.end_ids)
        self._ready, self._asked = [], []
        self._name_episodes(len(requests))
        rows = [json.loads(request.row or "{}") for request in requests]
        self._episodes = {number: begun(requests[number], row) for number, row in enumerate(rows)}
        for number, row in enumerate(rows):
            self._send(number, Reset(row.get("columns", {}), requests[number].environment_seed))

    def _advance(self, timeout: float | None) -> None:
        """Start turns, then wait briefly for engines and environments."""
        self._begin_turns()
        if self._engines.is_generating:
            # With waiting environments, poll engines only briefly, because a reply may come first.
            for place, sampled in self._engines.collect(WAIT_SECONDS if self._waiting else timeout):
                self._take_turn(self._asked[place], sampled)
            self._take_replies(0.0)
        elif self._waiting:
            # Poll instead of blocking, so that `collect` returns in time and a weight push can run in between.
            self._take_replies(WAIT_SECONDS)

    def _begin_turns(self) -> None:
        """Request the next turns for episodes with a reply. With `in_step`, wait until all episodes have one."""
        if self._in_step and (len(self._ready) < len(self._episodes) or self._engines.is_generating):
            return
        # Sort by number: with `in_step`, the batch order must not depend on which environment replied first.
        ready, self._ready = sorted(number for number in self._ready if number in self._episodes), []
        if not ready:
            return
        requests = [self._episodes[number].turn_request(self._first + number, self._limits.max_len) for number in ready]
        if self._in_step or not self._asked:
            self._asked = ready
            self._engines.begin(requests, self._sampling)
            # From now on, send each episode to the engine with its prefix in the cache.
            self._sampling = replace(self._sampling, continues=True)
        else:
            self._asked += ready
            self._engines.add(requests)

    def _take_turn(self, number: int, sampled: Generation) -> None:
        episode = self._episodes.get(number)
        if episode is None:
            return  # it was dropped
        turn = episode.add_turn(sampled, self._dialogue.read(sampled.token_ids, behind=episode.all_ids))
        # The new turn may exceed a limit set by `cut`, so its environment is not needed.
        self._give_up_long()
        if number not in self._episodes:
            return
        # A truncated turn is incomplete text, which must not reach the environment as an action.
        if sampled.finish_reason == "length":
            self._end(number, "length")
        elif not self._environments.description.tools:
            self._send(number, Text(turn.content))
        elif turn.calls:
            self._send(number, Calls(turn.calls))
        # No call could be parsed: the model sees the faults as results and may correct them.
        elif turn.faults:
            self._observe(number, ())
        else:
            self._end(number, "stop")

    def _take_replies(self, timeout: float) -> None:
        for name, reply in self._environments.collect(timeout):
            number = name - self._first
            if number in self._episodes:  # else it was dropped
                self._take_reply(number, reply)

    def _take_reply(self, number: int, reply: Reply) -> None:
        episode = self._episodes[number]
        self._waiting.remove(number)
        # A timed-out reply ends an episode like a length limit if its rewards are known.
        if reply.is_late and self._has_reward_so_far(episode):
            episode.finish_reason, episode.cut = "length", reply.failure or ""
            self._finish(number)
        elif reply.failure is not None:
            self._fail(number, reply.failure, reply.trace)
        # The reply to `Finish` carries the final reward even if the environment did not report the end.
        elif episode.is_finished or (reply.is_done and episode.turns):
            if reply.is_truncated:
                episode.finish_reason, episode.cut = "length", "ended it at a limit"
            episode.turn_rewards[-1] += reply.reward
            episode.lacks_reward = reply.lacks_reward
            self._finish(number)
        elif not episode.turns:
            self._open(number, reply)
        else:
            episode.turn_rewards[-1] += reply.reward
            self._observe(number, reply.observations)

    def _has_reward_so_far(self, episode: EpisodeProgress) -> bool:
        """Return whether an episode without a timely reply may end with its current rewards.

        A model can make a tool hang in any turn, but a `step` that hangs in the first turn is an environment bug. A
        final reward is unknown without the environment.
        """
        description = self._environments.description
        is_answered = len(episode.turns) > (0 if description.tools else 1)
        return is_answered and not episode.is_finished and not description.rewards_at_end

    def _open(self, number: int, reply: Reply) -> None:
        """Start an episode's first turn. The environment may have extended the prompt."""
        episode = self._episodes[number]
        episode.opening_reward = reply.reward
        opening = self._shortened("".join(reply.observations))
        if opening:
            try:
                episode.open(opening, self._dialogue.opened(episode.conversation, opening))
            except TemplateFault as fault:
                self._fail(number, f"added to the prompt, and {fault}")
                return
        # A response without a turn has no sampled token to train on.
        if reply.is_done or episode.num_tokens >= self._limits.max_len:
            self._fail(number, "ended before the first turn" if reply.is_done else "left no room for a turn")
        else:
            self._ready.append(number)

    def _observe(self, number: int, observations: Sequence[str]) -> None:
        """Add the replies to a turn, unless the episode has reached a limit."""
        episode = self._episodes[number]
        if len(episode.turns) == self._limits.max_turns:
            self._end(number, "length")
            return
        messages = self._messages(episode, observations)
        try:
            tokens = self._dialogue.between(episode.conversation, messages, last_id=episode.token_ids[-1])
        except TemplateFault as fault:
            self._fail(number, f"answered, and {fault}")
            return
        # A prompt of exactly `max_len` tokens leaves no room for a turn.
        if episode.num_tokens + len(tokens) >= self._limits.max_len:
            self._end(number, "length")
            return
        episode.add_observation(tokens, messages)
        self._ready.append(number)

    def _messages(self, episode: EpisodeProgress, observations: Sequence[str]) -> tuple[Message, ...]:
        """Return the replies to a turn: results and errors of its calls, or the next user message."""
        found = [self._shortened(observation) for observation in observations]
        if not self._environments.description.tools:
            return (Message("user", "\n".join(found)),)
        turn = episode.last_turn
        # A made-up tool name is untrusted model text, which must not become part of the template's markup.
        names = [call.name if call.name in self._tools else None for call in turn.calls]
        results = [*zip(names, found, strict=True), *((None, fault) for fault in turn.faults)]
        return tool_results(results, first=episode.num_results)

    def _shortened(self, observation: str) -> str:
        """Truncate an observation longer than any episode, so that tokenizing it does not block other episodes."""
        most = self._limits.max_len * CHARACTERS_PER_TOKEN
        return observation if len(observation) <= most else observation[:most] + _SHORTENED

    def _end(self, number: int, reason: Literal["stop", "length"]) -> None:
        """End an episode after a turn. The environment returns the final reward."""
        episode = self._episodes[number]
        episode.is_finished, episode.finish_reason = True, reason
        self._send(number, Finish())

    def _finish(self, number: int) -> None:
        episode = self._episodes[number]
        self._drop(number)
        self._finished.append((number, episode.generation()))

    def _send(self, number: int, action: Action) -> None:
        self._waiting.add(number)
        self._environments.send(self._first + number, action)

    def _fail(self, number: int, failure: str, trace: str = "") -> None:
        """End an episode after an environment failure."""
        episode = self._episodes[number]
        episode.failure, episode.trace = failure, trace
        self._finish(number)

    def _drop(self, number: int) -> None:
        self._environments.end(self._first + number)
        self._waiting.discard(number)
        del self._episodes[number]
