"""Plays an episode without a model: the user or a script writes the turns, and the environment responds.

Tokens, observations, limits and rewards come from the classes used in training (environment_player.py). Only the
engines are replaced.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.data.preview import Decode, PreviewPart, ShownExample, part_of
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.parts import UNREWARDED
from rlhf_cli.runs.episodes import EnvironmentPlan
from rlhf_cli.trainers.online.rollout import generate, request_of

_MADE_UP = "The answer is 1."
"""Last turn of the default script."""

Author = Callable[[Sequence[int], int], str | None]
"""(tokens so far, index of the first new token) -> text of the next turn, or None."""


class WrittenEngines:
    """Implements the engine interface with turns written by an author, for one episode at a time."""

    def __init__(self, author: Author, dialogue: ChatDialogue) -> None:
        self._author, self._dialogue = author, dialogue
        # Tokens of the episode that were already shown to the author.
        self._num_read = 0
        self._written: list[tuple[int, Generation]] = []
        self.is_out = False
        """Whether the author has no more turns."""

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Get the next turn from the author."""
        self._written = [(number, self._turn(request, sampling)) for number, request in enumerate(requests)]

    def add(self, requests: list[GenerationRequest]) -> None:
        """Raise AssertionError, because a single episode never adds requests to a batch."""
        raise AssertionError("written turns cannot be added to a batch")

    def _turn(self, request: GenerationRequest, sampling: SamplingParams) -> Generation:
        """Return the next turn, truncated at the limit like a sampled one. Without one, the episode is truncated."""
        text = self._author(request.prompt_ids, self._num_read)
        self.is_out = text is None
        written = [] if text is None else self._dialogue.written(text)
        # Truncate like an engine, so that the preview shows the effect of max_new_tokens.
        kept = written[: request.limit(sampling)]
        self._num_read = len(request.prompt_ids) + len(kept)
        is_whole = text is not None and kept == written
        # An untruncated turn ends with its end token, which `written` appends.
        return Generation(kept, [0.0] * len(kept), "stop" if is_whole else "length", 0)

    @property
    def is_generating(self) -> bool:
        """Whether a turn is available."""
        return bool(self._written)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return the written turns."""
        written, self._written = self._written, []
        return written

    def cut(self, max_tokens: int) -> None:
        """No-op: turns are complete when they are requested."""

    def wake_cache(self) -> None:
        """No-op: there is no cache."""

    def sleep(self) -> None:
        """No-op: there is no device memory."""

    def receive_weights(self, version: int) -> dict[str, float]:
        """No-op: there are no weights."""
        return {}


@dataclass(frozen=True)
class PlayedEpisode:
    """A played episode. `failure` completes the sentence "the environment ...", and `trace` is the traceback."""

    example: ShownExample
    failure: str | None
    trace: str


@dataclass(frozen=True)
class Rehearsal:
    """An episode to play with the first prompt of a dataset. `script` contains the turns from a file, if any."""

    plan: EnvironmentPlan
    prompt: Prompt
    where: str
    decode: Decode
    max_new_tokens: int
    seed: int
    script: tuple[str, ...] | None

    @property
    def about(self) -> str:
        """Description of the environment and the tools."""
        return self.plan.description.about

    @property
    def example_calls(self) -> list[str]:
        """Turns with a sample call for each tool."""
        return self.plan.dialogue.example_calls()

    def play(self, author: Author) -> PlayedEpisode:
        """Play the episode with turns from this author."""
        engines = WrittenEngines(author, self.plan.dialogue)
        seed = scattered_seed(self.seed, 0)
        request = request_of(self.prompt, seed, environment_seed=seed)
        with self.plan.played_by(engines) as episodes:
            (generation,) = asyncio.run(generate(episodes, [request], SamplingParams(self.max_new_tokens)))
        episode = generation.episode
        assert episode is not None
        facts = self._facts(generation, episode) | {"end": self._end(generation, episode, is_out=engines.is_out)}
        example = ShownExample(1, self.where, self._parts(generation, episode), facts)
        return PlayedEpisode(example, episode.failure, episode.trace)

    def play_script(self) -> PlayedEpisode:
        """Play the episode with the script's turns, or with sample calls."""
        turns = iter(self.script or (*(self.example_calls or [_MADE_UP]), _MADE_UP))
        return self.play(lambda token_ids, start: next(turns, None))

    def part(self, token_ids: Sequence[int], start: int) -> PreviewPart:
        """Return all tokens from `start` on: the prompt, or an environment response after a turn."""
        name, pictures = ("answer", ()) if start else ("prompt", self.prompt.pictures)
        new = token_ids[start:]
        none = [False] * len(new)
        return part_of(name, new, none, self.decode, behind=token_ids[:start], pictures=pictures, is_whole=True)

    def _parts(self, generation: Generation, episode: Episode) -> list[PreviewPart]:
        """Return the prompt, then alternating model turns, which are trained, and environment responses."""
        prompt_ids = episode.prompt_ids or self.prompt.prompt_ids
        ids, place = [*prompt_ids, *generation.token_ids], len(prompt_ids)
        parts = [self.part(prompt_ids, 0)]
        for number, (reward, (start, end)) in enumerate(zip(episode.turn_rewards, episode.turns, strict=True), 1):
            turn = ids[len(prompt_ids) + start : len(prompt_ids) + end]
            behind = ids[: len(prompt_ids) + start]
            if len(behind) > place:
                parts.append(self.part(behind, place))
            # Empty if no turn was written.
            if turn:
                name = f"turn {number}, reward {reward:g}" if self._has_reward(episode) else f"turn {number}"
                parts.append(part_of(name, turn, [True] * len(turn), self.decode, behind=behind, is_whole=True))
            place = len(behind) + len(turn)
        return parts

    def _facts(self, generation: Generation, episode: Episode) -> dict[str, str]:
        num_prompt = len(episode.prompt_ids or self.prompt.prompt_ids)
        num_turns = sum(end > start for start, end in episode.turns)
        observed = len(generation.token_ids) - generation.num_sampled
        tokens = f"{num_prompt:,} in the prompt, {generation.num_sampled:,} in turns, {observed:,} in responses"
        calls = {"calls": f"{episode.num_calls} valid, {episode.num_malformed} malformed"}
        return {
            "reward": self._reward(episode),
            "turns": f"{num_turns}; at most {self.plan.settings.max_turns} (max_turns)",
            **(calls if self.plan.description.tools else {}),
            "tokens": f"{tokens}; at most {self.plan.prompts.max_len:,} (max_len)",
        }

    def _has_reward(self, episode: Episode) -> bool:
        return self.plan.description.has_rewards and not episode.lacks_reward

    def _reward(self, episode: Episode) -> str:
        """Format the episode's reward, or the reason why there is none."""
        if episode.failure is not None:
            return f"none, because the environment {episode.failure}"
        if not self.plan.description.has_rewards:
            return "none, because this kind of server returns no rewards: set --reward_funcs"
        if episode.lacks_reward:
            return f"none, because the environment {UNREWARDED}"
        return f"{sum(episode.turn_rewards):g}"

    def _end(self, generation: Generation, episode: Episode, *, is_out: bool) -> str:
        """Return why the episode ended."""
        if episode.failure is not None:
            return "the environment failed"
        if is_out:
            return "no more turns"
        if generation.finish_reason == "stop":
            is_answered = "tool_calls" in episode.messages[-1] or not self.plan.description.tools
            return "the environment is done" if is_answered else "a turn without calls"
        if episode.cut:
            return f"truncated, because the environment {episode.cut}"
        return f"truncated at {self._limit(generation, episode)}"

    def _limit(self, generation: Generation, episode: Episode) -> str:
        """Return the setting that truncated an episode."""
        # A turn without its end token was truncated, by one of two limits.
        start, end = episode.turns[-1]
        if generation.token_ids[end - 1] not in self.plan.dialogue.end_ids:
            return "max_new_tokens" if end - start == self.max_new_tokens else "max_len"
        return "max_turns" if len(episode.turns) == self.plan.settings.max_turns else "max_len"


def read_turns(path: str) -> tuple[str, ...]:
    """Read turns from a file: a list of strings in FILE.json, otherwise one turn per line.

    Raises:
        UsageError: the file does not exist, is empty, or is not a list of strings.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        turns = json.loads(text) if file.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--turns {path} cannot be read: {error}") from error
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise UsageError(f"--turns {path} must be a list of strings, such as ['first turn', 'second turn']")
    if not turns:
        raise UsageError(f"--turns {path} contains no turns")
    return tuple(turns)
