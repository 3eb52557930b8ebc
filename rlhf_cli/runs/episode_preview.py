"""An episode that no model samples: a person or a script writes the turns, and the environment answers them.

Tokens, observations, limits and rewards come from the objects that training uses (episodes.py); the engines alone are
others.
"""

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
from rlhf_cli.trainers.online.rollout import request_of

MADE_UP = "The answer is 1."
"""A turn of the script that is used without another one."""

Author = Callable[[Sequence[int], int], str | None]
"""Returns the text of the next turn, None without one. Takes the tokens so far and the place of the first new one."""


class WrittenEngines:
    """Engines of one episode at a time, whose turns an author writes. They sample nothing and have no weights."""

    def __init__(self, author: Author, dialogue: ChatDialogue) -> None:
        self._author, self._dialogue = author, dialogue
        self._num_read = 0  # tokens of the episode that the author knows
        self._written: list[tuple[int, Generation]] = []
        self.is_out = False
        """Whether the author had no further turn."""

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return the next turn of each request."""
        self.begin(requests, sampling)
        return [turn for _, turn in self.collect()]

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Ask the author for the next turn."""
        self._written = [(number, self._turn(request, sampling)) for number, request in enumerate(requests)]

    def add(self, requests: list[GenerationRequest]) -> None:
        """Raise AssertionError: one episode has no turn beside another."""
        raise AssertionError("turns that are written go in step")

    def _turn(self, request: GenerationRequest, sampling: SamplingParams) -> Generation:
        """Return a turn, cut at its limit as a sampled one; without a turn the episode is at a limit too."""
        text = self._author(request.prompt_ids, self._num_read)
        self.is_out = text is None
        written = [] if text is None else self._dialogue.written(text)
        kept = written[: request.limit(sampling)]
        self._num_read = len(request.prompt_ids) + len(kept)
        is_whole = text is not None and kept == written
        return Generation(kept, [0.0] * len(kept), "stop" if is_whole else "length", 0)

    @property
    def is_generating(self) -> bool:
        """Whether a turn is to be collected."""
        return bool(self._written)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return the turns that were written."""
        written, self._written = self._written, []
        return written

    def cut(self, max_tokens: int) -> None:
        """Give up nothing: a turn is whole when it is asked for."""

    def wake_cache(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take no weights."""
        return {}


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode as it is shown.

    `failure` completes a sentence about an environment that failed, and `trace` is the traceback of its error.
    """

    example: ShownExample
    failure: str | None
    trace: str


@dataclass(frozen=True)
class Rehearsal:
    """One episode that can be played: the environment of a run, the first prompt, and the limit of a turn.

    `script` has the turns of the file that was given.
    """

    plan: EnvironmentPlan
    prompt: Prompt
    where: str
    decode: Decode
    max_new_tokens: int
    seed: int
    script: tuple[str, ...] | None

    @property
    def about(self) -> str:
        """The environment and its tools."""
        return self.plan.description.about

    @property
    def example_calls(self) -> list[str]:
        """A turn with a made-up call of each tool."""
        return self.plan.dialogue.example_calls()

    def play(self, author: Author) -> PlayedEpisode:
        """Return the episode with the turns of this author."""
        engines = WrittenEngines(author, self.plan.dialogue)
        seed = scattered_seed(self.seed, 0)
        request = request_of(self.prompt, seed, environment_seed=seed)
        with self.plan.played_by(engines) as episodes:
            (generation,) = episodes.generate([request], SamplingParams(self.max_new_tokens))
        episode = generation.episode
        assert episode is not None
        facts = self._facts(generation, episode) | {"end": self._end(generation, episode, is_out=engines.is_out)}
        example = ShownExample(1, self.where, self._parts(generation, episode), facts)
        return PlayedEpisode(example, episode.failure, episode.trace)

    def play_script(self) -> PlayedEpisode:
        """Return the episode with the turns of the script, or with made-up turns."""
        turns = iter(self.script or (*(self.example_calls or [MADE_UP]), MADE_UP))
        return self.play(lambda token_ids, start: next(turns, None))

    def part(self, token_ids: Sequence[int], start: int) -> PreviewPart:
        """Return the tokens from `start` on whole: the prompt, or an answer of the environment behind a turn."""
        name, pictures = ("answer", ()) if start else ("prompt", self.prompt.pictures)
        new = token_ids[start:]
        none = [False] * len(new)
        return part_of(name, new, none, self.decode, behind=token_ids[:start], pictures=pictures, is_whole=True)

    def _parts(self, generation: Generation, episode: Episode) -> list[PreviewPart]:
        """Return the prompt, and in turns the text of the model, which is trained, and the answers to it."""
        prompt_ids = episode.prompt_ids or self.prompt.prompt_ids
        ids, place = [*prompt_ids, *generation.token_ids], len(prompt_ids)
        parts = [self.part(prompt_ids, 0)]
        for number, (reward, (start, end)) in enumerate(zip(episode.turn_rewards, episode.turns, strict=True), 1):
            turn = ids[len(prompt_ids) + start : len(prompt_ids) + end]
            behind = ids[: len(prompt_ids) + start]
            if len(behind) > place:
                parts.append(self.part(behind, place))
            if turn:  # else no turn was written
                name = f"turn {number}, reward {reward:g}" if self._has_reward(episode) else f"turn {number}"
                parts.append(part_of(name, turn, [True] * len(turn), self.decode, behind=behind, is_whole=True))
            place = len(behind) + len(turn)
        return parts

    def _facts(self, generation: Generation, episode: Episode) -> dict[str, str]:
        num_prompt = len(episode.prompt_ids or self.prompt.prompt_ids)
        num_turns = sum(end > start for start, end in episode.turns)
        observed = len(generation.token_ids) - generation.num_sampled
        tokens = f"{num_prompt:,} of the prompt, {generation.num_sampled:,} of turns, {observed:,} of answers"
        calls = {"calls": f"{episode.num_calls}, and {episode.num_malformed} that could not be read"}
        return {
            "reward": self._reward(episode),
            "turns": f"{num_turns} of at most {self.plan.settings.max_turns}",
            **(calls if self.plan.description.tools else {}),
            "tokens": f"{tokens}; at most {self.plan.prompts.max_len:,} (max_len)",
        }

    def _has_reward(self, episode: Episode) -> bool:
        return self.plan.description.has_rewards and not episode.lacks_reward

    def _reward(self, episode: Episode) -> str:
        """Return the reward of an episode, or why there is none."""
        if episode.failure is not None:
            return f"none, for the environment {episode.failure}"
        if not self.plan.description.has_rewards:
            return "none, for a server of this kind has none: name a reward with --reward_funcs"
        return f"none, for the environment {UNREWARDED}" if episode.lacks_reward else f"{sum(episode.turn_rewards):g}"

    def _end(self, generation: Generation, episode: Episode, *, is_out: bool) -> str:
        """Return why the episode ended."""
        if episode.failure is not None:
            return "the environment failed"
        if is_out:
            return "no further turn was written"
        if generation.finish_reason == "stop":
            is_answered = "tool_calls" in episode.messages[-1] or not self.plan.description.tools
            return "the environment is done" if is_answered else "a turn without calls"
        if episode.cut:
            return f"truncated, for the environment {episode.cut}"
        return f"truncated at {self._limit(generation, episode)}"

    def _limit(self, generation: Generation, episode: Episode) -> str:
        """Return the setting that truncated an episode."""
        start, end = episode.turns[-1]
        if generation.token_ids[end - 1] not in self.plan.dialogue.end_ids:
            return "max_new_tokens" if end - start == self.max_new_tokens else "max_len"
        return "max_turns" if len(episode.turns) == self.plan.settings.max_turns else "max_len"


def read_turns(path: str) -> tuple[str, ...]:
    """Return the turns of a file: a list of texts in FILE.json, else one a line.

    Raises:
        UsageError: there is no such file, it has no turn, or it is no list of texts.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        turns = json.loads(text) if file.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--turns {path} cannot be read: {error}") from error
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise UsageError(f"--turns {path} is no list of texts like ['first turn', 'second turn']")
    if not turns:
        raise UsageError(f"--turns {path} has no turn")
    return tuple(turns)
