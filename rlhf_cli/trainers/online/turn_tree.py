"""An episode's turns as a tree with conversations as branches.

A turn follows another if its history starts with exactly that conversation; its tokens then start with that turn's
tokens. A history rewritten by an agent program starts a new branch, whereas an environment's episode has one branch.
Each sampled token is trained in one branch.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlhf_cli.data.formats.conversations import Message, Tool
from rlhf_cli.data.rollouts import Branch, Episode, Generation, joined_runs, oldest
from rlhf_cli.data.templates.message_forms import MessageForm
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import call_id

_AS_OPENAI = MessageForm(arguments_as_text=False, no_content="")  # in samples and reward files


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sampled turn.

    - `parent`: index of the previous turn in its branch, None for the first.
    - `given_ids`: tokens between the previous turn and this one, or the prompt.
    - `messages`: the conversation including the turn.
    - `start`: number of tokens before the branch's first turn.
    - `length`: number of tokens in the conversation including the turn.
    """

    parent: int | None
    given_ids: list[int]
    sampled: Generation
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    start: int
    length: int

    @property
    def span(self) -> tuple[int, int]:
        """Place of the turn's tokens in its branch's response."""
        return self.length - self.start - len(self.sampled.token_ids), self.length - self.start


class TurnTree:
    """Turns of an episode, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self.longest = 0  # response tokens in the longest branch
        self.num_calls = 0
        self.num_malformed = 0

    def add(
        self,
        parent: int | None,
        given_ids: list[int],
        sampled: Generation,
        turn: ParsedTurn,
        messages: Sequence[Message],
        tools: tuple[Tool, ...] = (),
        *,
        first_call: int,
    ) -> Message:
        """Add a turn sampled after `messages`. Returns its message, with call IDs counted from `first_call`."""
        calls = tuple(replace(call, id=call_id(first_call + place)) for place, call in enumerate(turn.calls))
        message = Message("assistant", turn.content, calls)
        start, length = (len(given_ids), 0) if parent is None else (self.turns[parent].start, self.turns[parent].length)
        if sampled.routed_experts is not None:
            # Tokens of earlier turns keep the experts with which they were sampled. A copy, because a view would hold
            # those of the whole conversation for each turn.
            sampled = replace(sampled, routed_experts=sampled.routed_experts[max(length - 1, 0) :].copy())
        length += len(given_ids) + len(sampled.token_ids)
        self.turns.append(_Turn(parent, given_ids, sampled, (*messages, message), tools, start, length))
        self.longest = max(self.longest, length - start)
        self.num_calls += len(calls)
        self.num_malformed += len(turn.faults)
        return message

    def parent_of(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> int | None:
        """Return the turn that a request continues, None if its history starts with no recorded conversation."""
        known = tuple(map(_compared, messages))
        found = None
        for number, turn in enumerate(self.turns):
            length = len(turn.messages)
            # Prefer the latest of equally long matches: the program probably continues its last choice.
            is_longest = found is None or length >= len(self.turns[found].messages)
            # Another list of tools renders to another prompt, so tokens cannot continue.
            is_behind = length < len(known) and turn.tools == tools
            if is_longest and is_behind and tuple(map(_compared, turn.messages)) == known[:length]:
                found = number
        return found

    def token_ids(self, number: int) -> list[int]:
        """Return the token IDs of the conversation that ends with a turn."""
        path = [self.turns[place] for place in self.path(number)]
        return [token for turn in path for ids in (turn.given_ids, turn.sampled.token_ids) for token in ids]

    def path(self, number: int) -> list[int]:
        """Return the turns of the conversation that ends with a turn, in order."""
        path = [number]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def generation(self, facts: Episode, finish_reason: Literal["stop", "length"]) -> Generation:
        """Return the response: the last conversation, with the others as earlier branches.

        `facts` contains what turns do not: rewards, messages, failure and prompt.
        """
        if not self.turns:
            return Generation([], [], finish_reason, 0, facts)
        # The last leaf is the response, and the others are earlier branches.
        parents = {turn.parent for turn in self.turns}
        *others, last = (number for number in range(len(self.turns)) if number not in parents)
        # Visit the response first, so that shared turns are trained in it and not in an earlier branch.
        trained: set[int] = set()
        response, own = self._branch(last, trained)
        earlier = [self._branch(leaf, trained) for leaf in others]
        sampled = [turn.sampled for _, turns in (*earlier, (response, own)) for turn in turns]
        runs = [run for one in sampled for run in one.runs]
        episode = replace(
            facts,
            turns=response.turns,
            num_calls=self.num_calls,
            num_malformed=self.num_malformed,
            earlier=tuple(branch for branch, _ in earlier),
        )
        logprobs = [value for one in sampled for value in one.logprobs]
        return Generation(
            response.token_ids,
            logprobs,
            finish_reason,
            oldest(runs),
            episode,
            joined_runs(runs),
            response.routed_experts,
        )

    def _branch(self, leaf: int, trained: set[int]) -> tuple[Branch, list[_Turn]]:
        """Return a leaf's branch with the turns trained in it, and mark these as trained."""
        own = [number for number in self.path(leaf) if number not in trained]
        trained.update(own)
        turns = [self.turns[number] for number in own]
        end, ids = self.turns[leaf], self.token_ids(leaf)
        spans = tuple(turn.span for turn in turns)
        messages, experts = entries(end.messages), self._routed_experts(leaf)
        return Branch(ids[: end.start], ids[end.start :], spans, messages, experts), turns

    def _routed_experts(self, number: int) -> np.ndarray | None:
        """Return the experts of the conversation that ends with a turn; None if engines returned none."""
        experts = [self.turns[place].sampled.routed_experts for place in self.path(number)]
        known = [own for own in experts if own is not None]
        return np.concatenate(known) if known else None


def entries(messages: Iterable[Message]) -> tuple[dict[str, object], ...]:
    """Return messages in OpenAI format, as in samples and reward files."""
    return tuple(map(_AS_OPENAI.entry, messages))


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of a turn, counted from 0, derived from the first turn's seed."""
    # crc32 instead of `hash`, which differs between processes for strings.
    return seed if number == 0 else zlib.crc32(f"{seed} {number}".encode()) & 0x7FFFFFFF


def _compared(message: Message) -> Message:
    """Normalize a message for history comparison: programs strip white space around model text."""
    return replace(message, content=message.content.strip()) if message.role == "assistant" else message
