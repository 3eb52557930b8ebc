"""Episodes of agent programs: one process per episode sends requests for turns, at any time and in parallel."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.chat_records import EPISODE_ENDED, ChatRequest, Choice, Completion, Refused
from rlhf_cli.data.formats.conversations import Conversation, Message, Tool
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.online.environment_player import Dialogue
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, SampleTurn
from rlhf_cli.trainers.online.turn_tree import TurnTree, entries, turn_seed

MOST_REPEATED = 32  # limit per request, above the automatic retries of any client
_REPEATED = (
    f"sent the same request more than {MOST_REPEATED} times: its client does not mark first tries "
    "(x-stainless-retry-count), so equal requests return the recorded turn; use n or change the text"
)
_FAILED = "(an agent program) "  # completes "the environment ..."


class _ProgramDialogue(Dialogue, Protocol):
    """A dialogue with prompts from a program."""

    def prompt(self, conversation: Conversation) -> list[int]:
        """Render a conversation up to the next turn. Returns token IDs."""
        ...

    def token_text(self, token_id: int) -> str:
        """Decode a single token."""
        ...


class _Dialogues(Protocol):
    """Dialogues by list of tools."""

    def of(self, tools: Sequence[Tool]) -> _ProgramDialogue: ...


class _Programs(Protocol):
    """The agent programs of a run."""

    async def play(
        self,
        row: Mapping[str, object],
        answer: Callable[[ChatRequest], Coroutine[object, object, Completion]],
        started: Callable[[], object],
    ) -> ProgramEnd: ...


class ProgramPlayer:
    """Plays episodes with one agent process each."""

    def __init__(self, programs: _Programs, dialogues: _Dialogues, limits: EpisodeLimits) -> None:
        self._programs, self._dialogues, self._limits = programs, dialogues, limits
        self._episodes: dict[int, _Episode] = {}  # by name, while they are played

    async def play(
        self, episode: int, request: GenerationRequest, sampling: SamplingParams, sample: SampleTurn
    ) -> Generation:
        """Run a program with the request's row until it exits. Its requests are answered meanwhile."""
        played = _Episode(replace(request, row=None, episode=episode), sampling, sample, self._dialogues, self._limits)
        self._episodes[episode] = played
        row: dict[str, Any] = json.loads(request.row or "{}")
        program = asyncio.create_task(self._programs.play(row.get("columns", {}), played.answer, played.start))
        try:
            await asyncio.wait({program, played.gave_up}, return_when=asyncio.FIRST_COMPLETED)
            return played.generation((played.gave_up if played.gave_up.done() else program).result())
        finally:
            # A dropped episode needs no process, and its late requests no turn.
            program.cancel()
            played.gave_up.cancel()
            del self._episodes[episode]

    def length(self, episode: int) -> int:
        """Return the number of response tokens so far in the longest branch."""
        return self._episodes[episode].tree.longest if episode in self._episodes else 0

    def is_busy(self, episode: int) -> bool:
        """Return whether the episode's process has started."""
        return episode in self._episodes and self._episodes[episode].has_started


class _Episode:
    """An episode's requests and turns. A request that continues a recorded conversation keeps its token IDs."""

    def __init__(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        sample: SampleTurn,
        dialogues: _Dialogues,
        limits: EpisodeLimits,
    ) -> None:
        self._request, self._sampling, self._sample = request, sampling, sample
        self._dialogues, self._limits = dialogues, limits
        self.tree = TurnTree()
        self.has_started = False
        # Gets the outcome of a program that must be killed. Done when requests get no more turns.
        self.gave_up: asyncio.Future[ProgramEnd] = asyncio.get_running_loop().create_future()
        self._answers: dict[str, asyncio.Task[Completion]] = {}  # by request identity
        self._repeats: Counter[str] = Counter()  # by request identity
        self._num_asked = 0
        self._is_at_limit = False  # the last request was refused because of a limit
        self._was_at_limit = False  # any request was

    def start(self) -> None:
        """Record that the process has started."""
        self.has_started = True

    async def answer(self, asked: ChatRequest) -> Completion:
        """Return the requested turns, or the recorded ones for a retry. Raises Refused."""
        if self.gave_up.done():
            raise Refused(EPISODE_ENDED, status=410)
        try:
            # Shielded: turns are recorded even if the client has disconnected, and a retry may wait for them too.
            return await asyncio.shield(self._turns_for(asked))
        except Refused:
            raise
        # The endpoint would only report a bug to the program.
        except Exception as defect:
            if not self.gave_up.done():
                self.gave_up.set_exception(defect)
            raise

    def generation(self, end: ProgramEnd) -> Generation:
        """Return the response."""
        turns = self.tree.turns
        if not turns:
            reason = _FAILED + (end.failure or "ended without a turn of the model")
            return self.tree.generation(Episode((), (), (), reason, trace=end.trace, num_repeated=0), "stop")
        # A parallel program may have had another request accepted before it failed because of the refusal.
        is_cut = self._is_at_limit or (self._was_at_limit and end.failure is not None)
        failure = None if end.failure is None or is_cut else _FAILED + end.failure
        # A program that ends at a limit without a reward counts as truncated with reward 0, not as failed.
        reward = 0.0 if end.reward is None and is_cut else end.reward
        path = self.tree.path(len(turns) - 1)
        facts = Episode(
            (),
            # The program's reward is for the whole episode, so assign it to the last turn.
            () if reward is None else (*[0.0] * (len(path) - 1), reward),
            entries(turns[-1].messages),
            failure,
            turns[path[0]].given_ids,
            trace=end.trace if failure else "",
            num_repeated=self._repeats.total(),
        )
        return self.tree.generation(facts, "length" if is_cut else turns[-1].sampled.finish_reason)

    def _turns_for(self, asked: ChatRequest) -> "asyncio.Task[Completion]":
        """Return the task that answers a request, which a retry shares with its first try."""
        # OpenAI clients retry after a timeout. A retry must receive the recorded turn; sampling it again would add an
        # untrained branch.
        if asked.identity not in self._answers or asked.is_first_try:
            self._answers[asked.identity] = self._accept(asked)
            return self._answers[asked.identity]
        self._repeats[asked.identity] += 1
        # A program that repeats a request forever would never end otherwise.
        if self._repeats[asked.identity] > MOST_REPEATED:
            self.gave_up.set_result(ProgramEnd(failure=_REPEATED))
            raise Refused(EPISODE_ENDED, status=410)
        return self._answers[asked.identity]

    def _accept(self, asked: ChatRequest) -> "asyncio.Task[Completion]":
        """Begin the requested turns. Raises Refused if the episode has no room for them."""
        limits = self._limits
        if self._num_asked + asked.n > limits.max_turns:
            self._reach_limit()
            raise Refused(f"the episode has reached {limits.max_turns} turns (--max_turns)", code="max_turns_exceeded")
        try:
            dialogue, parent, given_ids = self._prompt(asked)
        except (TemplateFault, UsageError) as fault:
            raise Refused(str(fault)) from None
        # Chat templates are third-party code, and Jinja lets any Python error in them through. It must not end the run.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Refused(f"failed to render the messages: {type(error).__name__}: {error}") from None
        prompt_ids = given_ids if parent is None else self.tree.token_ids(parent) + given_ids
        room = limits.max_len - len(prompt_ids)
        if room <= 0:
            self._reach_limit()
            raise _too_long(limits.max_len, f"{len(prompt_ids)} tokens")
        # An accepted request shows that the program has recovered from an earlier limit.
        self._is_at_limit = False
        # Remove duplicates, so that requests with equal stop strings can share a batch.
        stop = tuple(dict.fromkeys((*self._sampling.stop, *asked.stop)))
        sampling = replace(self._sampling, stop=stop, end_ids=dialogue.end_ids)
        # Clamp instead of refusing: programs often request a fixed number of tokens.
        longest = room if asked.max_tokens is None else min(room, asked.max_tokens)
        turns = []
        for _ in range(asked.n):
            seed = turn_seed(self._request.seed, self._num_asked)
            self._num_asked += 1
            turn = replace(self._request, prompt_ids=prompt_ids, seed=seed, max_new_tokens=longest)
            turns.append(self._sample(turn, sampling))
        return asyncio.create_task(self._complete(asked, dialogue, parent, given_ids, prompt_ids, turns))

    def _prompt(self, asked: ChatRequest) -> tuple[_ProgramDialogue, int | None, list[int]]:
        """Return the request's dialogue, the turn that it continues, and the tokens after that turn, or of the prompt.

        Raises:
            TemplateFault: the chat template rejects the messages.
            UsageError: the chat template does not support tools.
        """
        # Check the length in characters first: tokenizing a huge message would block all other episodes.
        if sum(len(message.content) for message in asked.messages) > self._limits.max_characters:
            self._reach_limit()
            raise _too_long(self._limits.max_len, "many more")
        dialogue, parent = self._dialogues.of(asked.tools), self.tree.parent_of(asked.messages, asked.tools)
        if parent is not None:
            turn = self.tree.turns[parent]
            new = asked.messages[len(turn.messages) :]
            with contextlib.suppress(TemplateFault):  # the template may accept the full conversation
                if _are_observations(new, has_tools=bool(asked.tools)):
                    last_id = turn.sampled.token_ids[-1]
                    return dialogue, parent, dialogue.between(Conversation(turn.messages), new, last_id=last_id)
        return dialogue, None, dialogue.prompt(Conversation(asked.messages))

    async def _complete(
        self,
        asked: ChatRequest,
        dialogue: _ProgramDialogue,
        parent: int | None,
        given_ids: list[int],
        prompt_ids: list[int],
        turns: Sequence[Awaitable[Generation]],
    ) -> Completion:
        """Wait for the sampled turns and record them."""
        # All choices are complete before the program is answered, since OpenAI's format returns them together.
        choices = []
        for sampled in await asyncio.gather(*turns):
            turn = dialogue.read(sampled.token_ids, behind=prompt_ids)
            # Sampled tokens include the stop text, but OpenAI's format excludes it.
            ends = [place for text in asked.stop if (place := turn.content.find(text)) >= 0]
            turn = replace(turn, content=turn.content[: min(ends)]) if ends else turn
            is_cut, own = sampled.finish_reason == "length", asked.max_tokens
            limit = min(self._limits.max_len - len(prompt_ids), self._sampling.max_new_tokens)
            is_own_cut = is_cut and own is not None and own < limit  # limit of the program, not of the episode
            # Only a cut by the episode's limits marks the response as truncated for rewards and the loss.
            recorded = replace(sampled, finish_reason="stop") if is_own_cut else sampled
            # Number calls per episode, not per turn, because results refer to calls of earlier turns.
            message = self.tree.add(
                parent, given_ids, recorded, turn, asked.messages, asked.tools, first_call=self.tree.num_calls
            )
            tokens = zip(map(dialogue.token_text, sampled.token_ids), sampled.logprobs, strict=True)
            choices.append(
                Choice(
                    message.content,
                    message.tool_calls,
                    "length" if is_cut else "tool_calls" if message.tool_calls else "stop",
                    len(sampled.token_ids),
                    tuple(tokens) if asked.logprobs else (),
                )
            )
        return Completion(tuple(choices), len(prompt_ids))

    def _reach_limit(self) -> None:
        """Record that a request is refused because of a limit."""
        self._is_at_limit = self._was_at_limit = True


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
