"""Generation records: requests to rollout engines, and responses."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.models.vision.pictures import PlacedPicture


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Returned log-probs refer to the distribution from which tokens are drawn.

    Applied in vLLM's order: `repetition_penalty`, `temperature`, `min_p`, `top_k` (0 disables it), `top_p`. Greedy
    sampling selects the most likely token after the penalty only. `stop` strings end a response as soon as it contains
    one; `end_ids` are additional end tokens, or with `ignores_eos` the only ones. With `continues`, the batch contains
    the next turns of the previous batch's episodes, so that engines reuse their prefix cache. With `returns_experts`,
    engines that record routed experts (`EngineSettings`) return them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    ignores_eos: bool = False
    continues: bool = False
    returns_experts: bool = False

    def all_end_ids(self, eos: Sequence[int]) -> set[int]:
        """Return all tokens that end a response, for a model with these EOS tokens."""
        return {*self.end_ids} if self.ignores_eos else {*eos, *self.end_ids}


def sampling_params(sampling: SamplingConfig, *, end_ids: tuple[int, ...] = ()) -> SamplingParams:
    """Convert the settings for engines, with the chat template's end tokens."""
    # Temperature 0 means greedy, which engines select with a separate switch.
    is_greedy = sampling.temperature == 0
    return SamplingParams(
        sampling.max_new_tokens,
        # A temperature of 0 would divide logits by zero.
        temperature=1.0 if is_greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        greedy=is_greedy,
        stop=tuple(sampling.stop),
        end_ids=end_ids,
    )


@dataclass(frozen=True)  # slots would slow down pickling
class GenerationRequest:
    """Request for one response. Equal requests give equal responses from equal weights.

    - `expected_tokens`: estimated response length for load balancing. Does not affect the response.
    - `prompt_ids`: contain all placeholder tokens of the `pictures`.
    - `max_new_tokens`: lower limit than the batch's.
    - `row`: the prompt's row as JSON, for environments. Engines ignore it.
    - `episode`: number of the turn's episode. All its turns go to the same engine.
    - `environment_seed`: shared by the environments of all samples of a prompt.
    - `json_schema`: the response is JSON text that this schema permits. Requires engines with `structured_outputs`.

    Example: `GenerationRequest([17, 10, 18, 28], seed=4711)` asks for a response to a prompt of 4 tokens.
    """

    prompt_ids: list[int]
    seed: int
    expected_tokens: int = 0
    pictures: tuple[PlacedPicture, ...] = ()
    max_new_tokens: int | None = None
    row: str | None = None
    episode: int | None = None
    environment_seed: int = 0
    json_schema: str | None = None

    @property
    def prompt(self) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Key for samples of the same prompt: equal tokens with other images are a different prompt."""
        # Lists are not hashable.
        return tuple(self.prompt_ids), self.pictures

    def limit(self, sampling: SamplingParams) -> int:
        """Return the maximum number of response tokens."""
        own = self.max_new_tokens
        return sampling.max_new_tokens if own is None else min(own, sampling.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Branch:
    """An earlier conversation of an episode with history rewritten by its program.

    `turns` are the token spans trained in this branch; turns shared with the response are trained there. `messages` are
    all messages in OpenAI format. `routed_experts` are those of its tokens (`Generation`).
    """

    prompt_ids: list[int]
    token_ids: list[int]
    turns: tuple[tuple[int, int], ...]
    messages: tuple[dict[str, Any], ...] = ()
    routed_experts: np.ndarray | None = field(default=None, compare=False)  # arrays have no truth value


@dataclass(frozen=True, slots=True)
class Episode:
    """Data of a multi-turn response.

    - `turns`: span of sampled tokens per turn. Tokens in between are observations and not trained.
    - `turn_rewards`: environment reward per turn.
    - `messages`: turns and observations in OpenAI format.
    - `failure`, `trace`: completes "the environment ..." after an error, with the traceback.
    - `cut`: completes "the environment ..." if it truncated the episode.
    - `prompt_ids`: replaces the prompt's tokens if the environment added the text `opening`, or a program used another
      prompt.
    - `num_calls`, `num_malformed`, `num_repeated`: tool calls, unparsable calls, and repeated requests.
    - `lacks_reward`: the environment returned no reward, not even 0; then `turn_rewards` are zeros.
    - `earlier`: earlier conversations if a program rewrote its history; the response is the last one. Messages then
      include the program's prompt.

    An agent program without a printed reward has no `turn_rewards`.
    """

    turns: tuple[tuple[int, int], ...]
    turn_rewards: tuple[float, ...]
    messages: tuple[dict[str, Any], ...] = ()
    failure: str | None = None
    prompt_ids: list[int] | None = None
    opening: str = ""
    num_calls: int = 0
    num_malformed: int = 0
    trace: str = ""
    cut: str = ""
    earlier: tuple[Branch, ...] = ()
    num_repeated: int | None = None
    lacks_reward: bool = False

    @property
    def num_turns(self) -> int:
        """Number of model turns in all branches."""
        return len(self.turns) + sum(len(branch.turns) for branch in self.earlier)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Episode":
        """Restore the record from JSON."""
        lists = {name: tuple(plain[name]) for name in ("turn_rewards", "messages")}
        earlier = tuple(
            Branch(**{**branch, "turns": _spans(branch["turns"]), "messages": tuple(branch["messages"])})
            for branch in plain.get("earlier", ())
        )
        return cls(**{**plain, **lists, "turns": _spans(plain["turns"]), "earlier": earlier})


def _spans(plain: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in plain)


_VersionRun = tuple[int, int]
"""A weight version, and the number of consecutive tokens sampled with it."""


def joined_runs(runs: Iterable[_VersionRun]) -> tuple[_VersionRun, ...]:
    """Merge adjacent runs of the same version; () if all tokens have the same version."""
    joined: list[_VersionRun] = []
    for version, count in runs:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return tuple(joined) if len(joined) > 1 else ()


def oldest(runs: Iterable[_VersionRun]) -> int:
    """Return the oldest weight version of any token; 0 without tokens."""
    return min((version for version, count in runs if count), default=0)


@dataclass(frozen=True)  # slots would slow down pickling
class Generation:
    """One sampled response.

    - `token_ids`: exactly the sampled tokens, including the end-of-sequence token or the token that completed a stop
      string.
    - `logprobs`: the sampler's log-probs (nats), one per sampled token.
    - `finish_reason`: "stop", or "length" if truncated at the limit.
    - `weight_version`: number of weight pushes, 0 for the initial weights. If weights were pushed during the response,
      the oldest version; `version_runs` then has all versions in the order of `logprobs`.
    - `episode`: data of a multi-turn response. Then `token_ids` include observations, and `logprobs` cover only sampled
      tokens, first from earlier branches and then from the response.
    - `routed_experts`: experts that each prompt and response token except the last was sent to, uint8 or uint16
      [tokens - 1, layers, top_k]; None without `--rollout_routing_replay`.
    - `text`: response without special tokens, if the engine decodes responses; None otherwise.

    Engines that decode send `token_ids` and `logprobs` as `array`s of int32 and float32: an eighth of the memory of
    lists, and no Python object per token.

    Example: `Generation([20, 2], [-0.1, -0.02], "stop", 12)` has 2 tokens, sampled with the weights after iteration 12.
    An episode of two turns of 3 tokens, with an observation of 3 tokens in between, has 9 `token_ids`, 6 `logprobs` and
    `turns` ((0, 3), (6, 9)).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int
    episode: Episode | None = None
    version_runs: tuple[_VersionRun, ...] = ()
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    text: str | None = None

    @property
    def runs(self) -> tuple[_VersionRun, ...]:
        """Weight versions of the sampled tokens."""
        return self.version_runs or ((self.weight_version, self.num_sampled),)

    @property
    def longest(self) -> int:
        """Number of tokens in the response, or in a longer earlier branch."""
        earlier = () if self.episode is None else self.episode.earlier
        # max fails on a single number, hence the 0.
        return max(len(self.token_ids), *(len(branch.token_ids) for branch in earlier), 0)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.logprobs)

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Spans of sampled tokens in the response."""
        return ((0, len(self.token_ids)),) if self.episode is None else self.episode.turns


def scattered_seed(seed: int, count: int) -> int:
    """Return the seed of request number `count`: below 2^31, and unique within 2^31 consecutive requests.

    Multiplies by an odd number (Knuth's golden ratio constant), which is a bijection modulo 2^31.
    """
    # crc32, because `hash` of a string differs between processes.
    return (zlib.crc32(str(seed).encode()) + count) * 2_654_435_761 % (1 << 31)
