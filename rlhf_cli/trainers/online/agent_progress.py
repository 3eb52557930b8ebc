"""An agent program's episode in progress: a tree of turns with conversations as branches.

A turn follows another if its history starts with exactly that conversation; its tokens then start with that turn's
tokens. A history rewritten by the program starts a new branch. Each sampled token is trained in one branch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.chat_records import ChatRequest, Completion
from rlhf_cli.data.formats.conversations import Message, Tool
from rlhf_cli.data.rollouts import Branch, Episode, Generation, GenerationRequest, joined_runs, oldest
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import call_id
from rlhf_cli.trainers.online.episode_progress import AS_OPENAI, turn_seed

_FAILED = "(an agent program) "  # completes "the environment ..."


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sampled turn. `parent` is the index of the previous turn in its branch, None for the first.

    `messages` is the conversation including the turn; `prompt_ids` are all tokens before it.
    """

    parent: int | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    prompt_ids: list[int]
    sampled: Generation
    root_length: int  # tokens before the branch's first turn

    @property
    def length(self) -> int:
        """Number of tokens in the conversation including the turn."""
        return len(self.prompt_ids) + len(self.sampled.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Token IDs of the conversation including the turn."""
        return self.prompt_ids + self.sampled.token_ids


@dataclass
class AgentProgress:
    """Turns of an episode. `answers` are keyed by request identity, None while pending."""

    request: GenerationRequest
    answers: dict[str, Completion | None] = field(default_factory=dict)
    is_at_limit: bool = False  # the last request was refused because of a limit
    was_at_limit: bool = False  # any request was
    repeats: Counter[str] = field(default_factory=Counter)  # retries by request identity
    num_asked: int = 0
    num_repeated: int = 0
    num_calls: int = 0
    num_malformed: int = 0
    _turns: list[_Turn] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Number of tokens in the longest response so far."""
        return max((turn.length - turn.root_length for turn in self._turns), default=0)

    def parent_of(self, asked: ChatRequest) -> int | None:
        """Return the turn that the request continues, None if its history starts with no recorded conversation."""
        known = tuple(map(_compared, asked.messages))
        found = None
        for number, turn in enumerate(self._turns):
            length = len(turn.messages)
            # Prefer the latest of equally long matches: the program probably continues its last choice.
            is_longest = found is None or length >= len(self._turns[found].messages)
            # Another list of tools renders to another prompt, so tokens cannot continue.
            is_behind = length < len(known) and turn.tools == asked.tools
            if is_longest and is_behind and tuple(map(_compared, turn.messages)) == known[:length]:
                found = number
        return found

    def conversation_of(self, number: int) -> tuple[tuple[Message, ...], list[int]]:
        """Return messages and token IDs up to and including a turn."""
        return self._turns[number].messages, self._turns[number].token_ids

    def reach_limit(self) -> None:
        """Record that a request was refused because of a limit."""
        self.is_at_limit = self.was_at_limit = True

    def next_seed(self) -> int:
        """Return the seed for another turn."""
        self.num_asked += 1
        return turn_seed(self.request.seed, self.num_asked - 1)

    def add(
        self, asked: ChatRequest, parent: int | None, prompt_ids: list[int], sampled: Generation, turn: ParsedTurn
    ) -> Message:
        """Add a sampled turn. Returns its message with call IDs."""
        # Number calls per episode, not per turn, because results refer to calls of earlier turns.
        calls = tuple(replace(call, id=call_id(self.num_calls + place)) for place, call in enumerate(turn.calls))
        self.num_calls += len(calls)
        self.num_malformed += len(turn.faults)
        message = Message("assistant", turn.content, calls)
        root_length = len(prompt_ids) if parent is None else self._turns[parent].root_length
        self._turns.append(_Turn(parent, (*asked.messages, message), asked.tools, prompt_ids, sampled, root_length))
        return message

    def generation(self, end: ProgramEnd) -> Generation:
        """Return the response: the last conversation, with the others as earlier branches."""
        if not self._turns:
            reason = end.failure or "ended without a turn of the model"
            return Generation([], [], "stop", 0, Episode((), (), (), _FAILED + reason, trace=end.trace, num_repeated=0))
        # The last leaf is the response, and the others are earlier branches.
        *others, last = self._leaves()
        trained: set[int] = set()
        # Visit the response first, so that shared turns are trained in it and not in an earlier branch.
        response = self._branch(last, trained)
        branches = [self._branch(leaf, trained) for leaf in others]
        sampled = [turn.sampled for branch in (*branches, response) for turn in branch.own]
        logprobs = [value for one in sampled for value in one.logprobs]
        runs = [run for one in sampled for run in one.runs]
        final = self._turns[last].sampled
        # A parallel program may have had another request accepted before it failed because of the refusal.
        is_cut = self.is_at_limit or (self.was_at_limit and end.failure is not None)
        failure = None if end.failure is None or is_cut else _FAILED + end.failure
        # A program that ends at a limit without a reward counts as truncated with reward 0, not as failed.
        reward = 0.0 if end.reward is None and is_cut else end.reward
        finish_reason: Literal["stop", "length"] = "length" if is_cut else final.finish_reason
        facts = Episode(
            response.branch.turns,
            # The program's reward is for the whole episode, so assign it to the last turn.
            () if reward is None else (*[0.0] * (len(response.branch.turns) - 1), reward),
            response.branch.messages,
            failure,
            response.branch.prompt_ids,
            num_calls=self.num_calls,
            num_malformed=self.num_malformed,
            trace=end.trace if failure else "",
            earlier=tuple(one.branch for one in branches),
            num_repeated=self.num_repeated,
        )
        return Generation(response.branch.token_ids, logprobs, finish_reason, oldest(runs), facts, joined_runs(runs))

    def _leaves(self) -> list[int]:
        """Return the last turn of each branch, in sampling order."""
        parents = {turn.parent for turn in self._turns}
        return [number for number in range(len(self._turns)) if number not in parents]

    def _branch(self, leaf: int, trained: set[int]) -> "_FoundBranch":
        """Return a leaf's branch, and mark its turns as trained."""
        path = self._path(leaf)
        start = len(self._turns[path[0]].prompt_ids)
        own = [number for number in path if number not in trained]
        trained |= set(own)
        turns = [self._turns[number] for number in own]
        spans = tuple((len(turn.prompt_ids) - start, turn.length - start) for turn in turns)
        token_ids, messages = self._turns[leaf].token_ids, self._turns[leaf].messages
        entries = tuple(map(AS_OPENAI.entry, messages))
        return _FoundBranch(Branch(token_ids[:start], token_ids[start:], spans, entries), turns)

    def _path(self, leaf: int) -> list[int]:
        """Return a branch's turns in order."""
        path = [leaf]
        while (parent := self._turns[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, slots=True)
class _FoundBranch:
    """A branch, with the turns trained in it."""

    branch: Branch
    own: Sequence[_Turn]


def _compared(message: Message) -> Message:
    """Normalize a message for history comparison: programs strip white space around model text."""
    return replace(message, content=message.content.strip()) if message.role == "assistant" else message
