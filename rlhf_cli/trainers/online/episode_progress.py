"""An episode in progress: tokens, turns, messages and rewards."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_cli.data.formats.conversations import Conversation, Message, message_of
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, VersionRun, joined_runs, oldest
from rlhf_cli.data.templates.message_forms import MessageForm
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.data.templates.turn_bridge import call_id

AS_OPENAI = MessageForm(arguments_as_text=False, no_content="")
"""Message format for samples and reward files."""


@dataclass
class EpisodeProgress:
    """An episode with a response that ends with the last turn or the observation after it."""

    request: GenerationRequest
    conversation: Conversation
    num_given: int  # number of prompt messages
    prompt_ids: list[int]
    opening: str = ""  # environment text at the end of the prompt
    opening_reward: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    last_turn: ParsedTurn = field(default_factory=lambda: ParsedTurn("", (), ()))
    finish_reason: Literal["stop", "length"] = "stop"
    num_calls: int = 0
    num_malformed: int = 0
    failure: str | None = None
    trace: str = ""
    cut: str = ""
    runs: list[VersionRun] = field(default_factory=list)
    is_finished: bool = False
    lacks_reward: bool = False

    @property
    def num_results(self) -> int:
        """Number of call results so far."""
        return sum(message.role == "tool" for message in self.conversation.messages[self.num_given :])

    @property
    def all_ids(self) -> list[int]:
        """Prompt and response token IDs."""
        return self.prompt_ids + self.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def longest(self) -> int:
        """Number of response tokens."""
        return len(self.token_ids)

    def open(self, opening: str, prompt_ids: list[int]) -> None:
        """Append an observation to the last prompt message. `prompt_ids` are the new prompt tokens."""
        *before, last = self.conversation.messages
        begun_with = replace(last, content=last.content + opening)
        self.opening, self.prompt_ids = opening, prompt_ids
        self.conversation = replace(self.conversation, messages=(*before, begun_with))

    def turn_request(self, name: int, max_len: int) -> GenerationRequest:
        """Return the request for the next turn, with a separate seed per turn. `name` is the episode's name."""
        seed = turn_seed(self.request.seed, len(self.turns))
        return replace(
            self.request,
            prompt_ids=self.all_ids,
            seed=seed,
            row=None,
            episode=name,
            max_new_tokens=max_len - self.num_tokens,
        )

    def add_turn(self, sampled: Generation, turn: ParsedTurn) -> ParsedTurn:
        """Add a sampled turn. Returns it with call IDs, which identify the results."""
        # Call IDs continue over turns, since some templates match results to calls by ID.
        first = self.num_results
        calls = tuple(replace(call, id=call_id(first + place)) for place, call in enumerate(turn.calls))
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.turns.append((start, len(self.token_ids)))
        # Add the reward of `reset` to the first turn, because only sampled tokens have rewards.
        self.turn_rewards.append(0.0 if start else self.opening_reward)
        self.runs += sampled.runs
        self.last_turn = replace(turn, calls=calls)
        self.num_calls += len(calls)
        self.num_malformed += len(turn.faults)
        self._add((Message("assistant", turn.content, calls),))
        return self.last_turn

    def add_observation(self, token_ids: list[int], messages: Sequence[Message]) -> None:
        """Add tokens and messages between the last turn and the next."""
        self.token_ids += token_ids
        self._add(messages)

    def _add(self, messages: Sequence[Message]) -> None:
        self.conversation = replace(self.conversation, messages=(*self.conversation.messages, *messages))

    def generation(self) -> Generation:
        """Return the response."""
        facts = Episode(
            tuple(self.turns),
            tuple(self.turn_rewards),
            tuple(map(AS_OPENAI.entry, self.conversation.messages[self.num_given :])),
            self.failure,
            self.prompt_ids if self.opening else None,
            self.opening,
            num_calls=self.num_calls,
            num_malformed=self.num_malformed,
            trace=self.trace,
            cut=self.cut,
            lacks_reward=self.lacks_reward,
        )
        return Generation(
            self.token_ids, self.logprobs, self.finish_reason, oldest(self.runs), facts, joined_runs(self.runs)
        )


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of a turn, counted from 0, derived from the first turn's seed."""
    # crc32 instead of `hash`, which differs between processes for strings.
    return seed if number == 0 else zlib.crc32(f"{seed} {number}".encode()) & 0x7FFFFFFF


def begun(request: GenerationRequest, row: Mapping[str, Any]) -> EpisodeProgress:
    """Create the episode for a request with prompt messages in its row."""
    messages = tuple(map(message_of, row.get("messages", [])))
    return EpisodeProgress(request, Conversation(messages), len(messages), request.prompt_ids)
