"""Episodes of agent programs: rollout engines that sample the conversations of one process per request.

Programs send requests at any time, so turns are not synchronized. Idle engines receive a batch of turns when all
running programs wait for a turn, or after a short grace period. Later turns join that batch.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.agent_programs import Asked, Ended, Event, Started
from rlhf_cli.agents.chat_records import ChatRequest, Choice, Completion, Refused
from rlhf_cli.data.formats.conversations import Conversation, Message, Tool
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.online.agent_progress import AgentProgress
from rlhf_cli.trainers.online.episodes import Dialogue, EpisodeLimits
from rlhf_cli.trainers.online.interfaces import TurnEngines
from rlhf_cli.trainers.online.multi_turn import CHARACTERS_PER_TOKEN, WAIT_SECONDS, MultiTurnEngines

# A short delay lets requests of fast programs share a batch, whose start is expensive, without delaying slow ones much.
_GRACE_SECONDS = 0.1  # time that a turn waits for programs that are still computing
MOST_REPEATED = 32  # limit per request, above the automatic retries of any client
_REPEATED = (
    f"sent the same request more than {MOST_REPEATED} times: its client does not mark first tries "
    "(x-stainless-retry-count), so equal requests return the recorded turn; use n or change the text"
)


class ProgramDialogue(Dialogue, Protocol):
    """A dialogue with prompts from a program."""

    def prompt(self, conversation: Conversation) -> list[int]:
        """Render a conversation up to the next turn. Returns token IDs."""
        ...

    def token_text(self, token_id: int) -> str:
        """Decode a single token."""
        ...


class Dialogues(Protocol):
    """Dialogues by list of tools."""

    def of(self, tools: Sequence[Tool]) -> ProgramDialogue: ...


class Programs(Protocol):
    """The agent programs of a run."""

    def start(self, episode: int, row: Mapping[str, object]) -> None: ...

    def end(self, episode: int) -> None: ...

    def answer(self, ticket: int, answer: Completion | Refused) -> None: ...

    def collect(self, timeout: float | None = None) -> list[Event]: ...


@dataclass(eq=False)
class _Order:
    """A request waiting for its turns. `tickets` include its retries."""

    number: int
    asked: ChatRequest
    dialogue: ProgramDialogue
    parent: int | None
    prompt_ids: list[int]
    tickets: list[int]
    sampled: dict[int, Generation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A turn to sample: choice number `place` for an order."""

    order: _Order
    place: int
    request: GenerationRequest
    since: float


class AgentEngines(MultiTurnEngines[AgentProgress]):
    """Rollout engines with one agent program episode per response."""

    def __init__(self, engines: TurnEngines, programs: Programs, dialogues: Dialogues, limits: EpisodeLimits) -> None:
        super().__init__(engines, in_step=False)
        self._programs, self._dialogues, self._limits = programs, dialogues, limits
        self._sampling = SamplingParams(0)
        self._running: set[int] = set()  # episodes with a running process
        self._waiting: Counter[int] = Counter()  # unanswered requests per episode
        self._orders: list[_Order] = []  # unanswered
        self._wanted: list[_Wanted] = []
        self._begun: list[_Wanted] = []  # in engine batch order
        self._begun_with: SamplingParams | None = None

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a program for each request, with the request's row."""
        # Programs of a previous batch, such as after a failed round, must not send requests into this one.
        self._drop_all()
        self._sampling, self._begun_with = sampling, None
        self._name_episodes(len(requests))
        self._episodes = {number: AgentProgress(request) for number, request in enumerate(requests)}
        for number, request in enumerate(requests):
            row: dict[str, Any] = json.loads(request.row or "{}")
            self._programs.start(self._first + number, row.get("columns", {}))

    def _advance(self, timeout: float | None) -> None:
        """Wait briefly for turns from engines and requests from programs. Starts the next turns when due."""
        # Poll engines first: with a running batch, waiting for program events would delay finished turns.
        if self._engines.is_generating:
            for place, sampled in self._engines.collect(WAIT_SECONDS):
                self._take_turn(self._begun[place], sampled)
            self._take_events(0.0)
        else:
            self._take_events(self._patience(timeout))
        # While engines generate, new turns can join at once; idle engines wait for more turns.
        if self._wanted and (self._engines.is_generating or self._patience(None) == 0.0):
            self._begin_turns()

    def _patience(self, timeout: float | None) -> float | None:
        """Return how long to wait for events before the next turns start, at most `timeout` seconds."""
        if not self._wanted:
            return timeout
        # All running programs wait for a turn, so no other request can arrive.
        if all(self._waiting[number] for number in self._running):
            return 0.0
        left = max(0.0, self._wanted[0].since + _GRACE_SECONDS - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def _begin_turns(self) -> None:
        """Send turns with equal sampling parameters to the engines. Others wait for the end of the batch."""
        # The oldest turn selects the parameters, so that no turn waits indefinitely.
        sampling = self._sampling_of(self._wanted[0].order)
        joins = sampling == self._begun_with
        if self._engines.is_generating and not joins:
            return
        chosen: list[_Wanted] = []
        others: list[_Wanted] = []
        for one in self._wanted:
            (chosen if self._sampling_of(one.order) == sampling else others).append(one)
        self._wanted = others
        requests = [one.request for one in chosen]
        if joins:
            self._begun += chosen
            self._engines.add(requests)
            # Later batches go to the engine that has the prefix cache of the episode (`continues`).
            return
        # The first batch has no prefixes in the cache, so it can be balanced freely over engines.
        continues = self._begun_with is not None
        self._begun, self._begun_with = chosen, sampling
        self._engines.begin(requests, replace(sampling, continues=continues))

    def _sampling_of(self, order: _Order) -> SamplingParams:
        # Remove duplicates, so that requests with equal stop strings can share a batch.
        stop = tuple(dict.fromkeys((*self._sampling.stop, *order.asked.stop)))
        return replace(self._sampling, stop=stop, end_ids=order.dialogue.end_ids)

    def _take_events(self, timeout: float | None) -> None:
        for event in self._programs.collect(timeout):
            number = event.episode - self._first
            if number not in self._episodes:
                continue  # it was dropped
            match event:
                case Started():
                    self._running.add(number)
                case Asked(_, ticket, asked):
                    self._waiting[number] += 1
                    self._take_request(number, ticket, asked)
                case Ended(_, end):
                    self._finish(number, end)

    def _take_request(self, number: int, ticket: int, asked: ChatRequest) -> None:
        """Record the requested turns, unless the request is a retry or is refused."""
        episode = self._episodes[number]
        # OpenAI clients retry after a timeout. A retry must receive the recorded turn; sampling it again would add an
        # untrained branch.
        if asked.identity in episode.answers and not asked.is_first_try:
            episode.num_repeated += 1
            episode.repeats[asked.identity] += 1
            # A program that repeats a request forever would never end otherwise.
            if episode.repeats[asked.identity] > MOST_REPEATED:
                self._finish(number, ProgramEnd(failure=_REPEATED))
                return
            answer = episode.answers[asked.identity]
            if answer is not None:
                self._answer(number, ticket, answer)
            else:
                orders = (one for one in self._orders if (one.number, one.asked.identity) == (number, asked.identity))
                next(orders).tickets.append(ticket)
            return
        try:
            self._accept(number, ticket, asked)
        except Refused as refused:
            self._answer(number, ticket, refused)

    def _accept(self, number: int, ticket: int, asked: ChatRequest) -> None:
        """Record the requested turns. Raises Refused if the episode has no room for them."""
        episode, limits = self._episodes[number], self._limits
        if episode.num_asked + asked.n > limits.max_turns:
            episode.reach_limit()
            raise Refused(f"the episode has reached {limits.max_turns} turns (--max_turns)", code="max_turns_exceeded")
        try:
            dialogue, parent, prompt_ids = self._prompt(episode, asked)
        except (TemplateFault, UsageError) as fault:
            raise Refused(str(fault)) from None
        # Chat templates are third-party code, and Jinja lets any Python error in them through. It must not end the run.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Refused(f"failed to render the messages: {type(error).__name__}: {error}") from None
        room = limits.max_len - len(prompt_ids)
        if room <= 0:
            episode.reach_limit()
            raise _too_long(limits.max_len, f"{len(prompt_ids)} tokens")
        # An accepted request shows that the program has recovered from an earlier limit.
        episode.is_at_limit, episode.answers[asked.identity] = False, None
        order = _Order(number, asked, dialogue, parent, prompt_ids, [ticket])
        self._orders.append(order)
        # Clamp instead of refusing: programs often request a fixed number of tokens.
        longest = room if asked.max_tokens is None else min(room, asked.max_tokens)
        for place in range(asked.n):
            request = replace(
                episode.request,
                prompt_ids=prompt_ids,
                seed=episode.next_seed(),
                row=None,
                episode=self._first + number,
                max_new_tokens=longest,
            )
            self._wanted.append(_Wanted(order, place, request, time.monotonic()))

    def _prompt(self, episode: AgentProgress, asked: ChatRequest) -> tuple[ProgramDialogue, int | None, list[int]]:
        """Return the request's dialogue, preceding turn, and prompt token IDs.

        Raises:
            TemplateFault: the chat template rejects the messages.
            UsageError: the chat template does not support tools.
        """
        # Check the length in characters first: tokenizing a huge message would block all other episodes.
        if sum(len(message.content) for message in asked.messages) > self._limits.max_len * CHARACTERS_PER_TOKEN:
            episode.reach_limit()
            raise _too_long(self._limits.max_len, "many more")
        dialogue, parent = self._dialogues.of(asked.tools), episode.parent_of(asked)
        if parent is not None:
            messages, token_ids = episode.conversation_of(parent)
            new = asked.messages[len(messages) :]
            with contextlib.suppress(TemplateFault):  # the template may accept the full conversation
                if _are_observations(new, has_tools=bool(asked.tools)):
                    between = dialogue.between(Conversation(messages), new, last_id=token_ids[-1])
                    return dialogue, parent, token_ids + between
        return dialogue, None, dialogue.prompt(Conversation(asked.messages))

    def _take_turn(self, wanted: _Wanted, sampled: Generation) -> None:
        order = wanted.order
        if order not in self._orders:
            return  # its episode has ended
        order.sampled[wanted.place] = sampled
        if len(order.sampled) < order.asked.n:
            return
        # All choices are complete before the program is answered, since OpenAI's format returns them together.
        self._orders.remove(order)
        episode = self._episodes[order.number]
        choices = tuple(self._choice(episode, order, order.sampled[place]) for place in range(order.asked.n))
        completion = Completion(choices, len(order.prompt_ids))
        episode.answers[order.asked.identity] = completion
        for ticket in order.tickets:
            self._answer(order.number, ticket, completion)
        # Check after each turn, because `cut` may have set a limit during the batch.
        self._give_up_long()

    def _choice(self, episode: AgentProgress, order: _Order, sampled: Generation) -> Choice:
        """Record a turn and return it in the form for the program: without the stop text."""
        turn = order.dialogue.read(sampled.token_ids, behind=order.prompt_ids)
        # Sampled tokens include the stop text, but OpenAI's format excludes it.
        ends = [place for text in order.asked.stop if (place := turn.content.find(text)) >= 0]
        turn = replace(turn, content=turn.content[: min(ends)]) if ends else turn
        is_cut = sampled.finish_reason == "length"
        own = order.asked.max_tokens
        limit = min(self._limits.max_len - len(order.prompt_ids), self._sampling.max_new_tokens)
        is_own_cut = is_cut and own is not None and own < limit  # limit of the program, not of the episode
        # Only a cut by the episode's limits marks the response as truncated for rewards and the loss.
        recorded = replace(sampled, finish_reason="stop") if is_own_cut else sampled
        message = episode.add(order.asked, order.parent, order.prompt_ids, recorded, turn)
        tokens = zip(map(order.dialogue.token_text, sampled.token_ids), sampled.logprobs, strict=True)
        return Choice(
            message.content,
            message.tool_calls,
            "length" if is_cut else "tool_calls" if message.tool_calls else "stop",
            len(sampled.token_ids),
            tuple(tokens) if order.asked.logprobs else (),
        )

    def _answer(self, number: int, ticket: int, answer: Completion | Refused) -> None:
        self._waiting[number] -= 1
        self._programs.answer(ticket, answer)

    def _finish(self, number: int, end: ProgramEnd) -> None:
        episode = self._episodes[number]
        # Drop first: it stops the program, whose late events then find no episode.
        self._drop(number)
        self._finished.append((number, episode.generation(end)))

    def _drop(self, number: int) -> None:
        self._programs.end(self._first + number)
        del self._episodes[number]
        self._running.discard(number)
        del self._waiting[number]
        self._orders = [order for order in self._orders if order.number != number]
        self._wanted = [one for one in self._wanted if one.order.number != number]


def _are_observations(messages: Sequence[Message], *, has_tools: bool) -> bool:
    """Return whether messages may follow a turn: tool results, then user messages."""
    roles = [message.role for message in messages]
    num_results = roles.count("tool")
    return (has_tools or not num_results) and roles == ["tool"] * num_results + ["user"] * (len(roles) - num_results)


def _too_long(max_len: int, found: str) -> Refused:
    return Refused(
        f"the maximum context length is {max_len} tokens (--max_len), but the messages have {found}",
        code="context_length_exceeded",
        param="messages",
    )
