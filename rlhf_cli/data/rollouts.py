"""Records of generation: requests to a rollout engine, and its responses."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_cli.config.generate import ResponseSamplingConfig
from rlhf_cli.models.vision.pictures import PlacedPicture


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled. Log-probs that come back are of the distribution that tokens are drawn from.

    The order is vLLM's: `repetition_penalty`, `temperature`, `min_p`, `top_k` (0 for all tokens), `top_p`. Greedy
    sampling takes the likeliest token after the penalty alone. `stop` are texts that end a response as soon as one of
    them is in it; `end_ids` are tokens that end it besides those of the model. A batch that `continues` has the next
    turns of the episodes in the batch before: engines keep what they have computed for them.
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
    continues: bool = False


def sampling_params(sampling: ResponseSamplingConfig, *, end_ids: tuple[int, ...] = ()) -> SamplingParams:
    """Return the settings as engines take them, with the tokens that end a response by a chat template."""
    is_greedy = sampling.temperature == 0
    return SamplingParams(
        sampling.max_new_tokens,
        temperature=1.0 if is_greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        greedy=is_greedy,
        stop=tuple(sampling.stop),
        end_ids=end_ids,
    )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample. The same request gives the same response from the same weights.

    `expected_tokens` is a guess of the response's length, by which engines are loaded evenly; it changes no response.
    `prompt_ids` have the whole run of each of the `pictures`. `max_new_tokens` is a lower limit than that of the batch.
    `row` is the prompt's row as JSON, which an environment reads and no engine gets. `episode` is the number of the
    episode whose turn this is: all turns go to the same engine. Environments of all samples of a prompt begin with the
    same `environment_seed`.
    """

    prompt_ids: list[int]
    seed: int
    expected_tokens: int = 0
    pictures: tuple[PlacedPicture, ...] = ()
    max_new_tokens: int | None = None
    row: str | None = None
    episode: int | None = None
    environment_seed: int = 0

    @property
    def prompt(self) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """The part that the samples of a prompt have in common: equal tokens with other pictures are another prompt."""
        return tuple(self.prompt_ids), self.pictures

    def limit(self, sampling: SamplingParams) -> int:
        """Return the most tokens that the response may have."""
        own = self.max_new_tokens
        return sampling.max_new_tokens if own is None else min(own, sampling.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Branch:
    """A conversation of an episode whose program rewrote its history, besides the response's own.

    `turns` are the spans of tokens that are trained here; turns that the response has too are trained there.
    `messages` are all messages of the conversation in OpenAI's form.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    turns: tuple[tuple[int, int], ...]
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """The facts about a response that took several turns.

    `turns` are the spans of sampled tokens in the response, one a turn; tokens between them are observations, which
    nothing trains on. `turn_rewards` are the environment's rewards by turn. `messages` are turns and observations in
    OpenAI's form. `failure` completes a sentence about an environment that broke, and `trace` is the traceback of its
    error; `cut` completes a sentence about an environment that truncated the episode. `prompt_ids` replace the
    prompt's if the environment added the text `opening` to it, or a program wrote its own. The counts are of tool
    calls, of calls that could not be read, and of requests that were repeated.

    An episode `lacks_reward` if its environment gave none at all, not even 0: `turn_rewards` are zeros then. An agent
    program has no `turn_rewards` if it printed no reward. If it rewrote its history the response is the last
    conversation, and `earlier` the others; messages begin with those of the program's prompt.
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
        """The turns of the model, of all branches."""
        return len(self.turns) + sum(len(branch.turns) for branch in self.earlier)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Episode":
        """Return the record from JSON."""
        lists = {name: tuple(plain[name]) for name in ("turn_rewards", "messages")}
        earlier = tuple(
            Branch(**{**branch, "turns": _spans(branch["turns"]), "messages": tuple(branch["messages"])})
            for branch in plain.get("earlier", ())
        )
        return cls(**{**plain, **lists, "turns": _spans(plain["turns"]), "earlier": earlier})


def _spans(plain: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in plain)


VersionRun = tuple[int, int]
"""A version of the weights, and the number of tokens in a row that they sampled."""


def joined_runs(runs: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """Return the runs with neighbours of one version joined; () if a single version sampled all tokens."""
    joined: list[VersionRun] = []
    for version, count in runs:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return tuple(joined) if len(joined) > 1 else ()


def oldest(runs: Iterable[VersionRun]) -> int:
    """Return the oldest version of the weights that sampled a token; 0 without any."""
    return min((version for version, count in runs if count), default=0)


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response.

    `token_ids` are exactly the sampled tokens, up to and with the end-of-sequence token or the token that completed a
    stop string. `logprobs` (nats, same length) are the sampler's own. `finish_reason` is "stop" for such an end and
    "length" for a response cut at the limit. `weight_version` counts weight pushes, 0 for the initial weights. If
    weights were pushed while the response was sampled, it is the oldest version, and `version_runs` has the version of
    every token, in the order of `logprobs`.

    In an `episode` of several turns `token_ids` have observations too, and `logprobs` are of the sampled tokens alone,
    first of its earlier branches and then of the response.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int
    episode: Episode | None = None
    version_runs: tuple[VersionRun, ...] = ()

    @property
    def runs(self) -> tuple[VersionRun, ...]:
        """The versions of the sampled tokens."""
        return self.version_runs or ((self.weight_version, self.num_sampled),)

    @property
    def longest(self) -> int:
        """The tokens of the response, or of an earlier branch of its episode that has more."""
        earlier = () if self.episode is None else self.episode.earlier
        return max(len(self.token_ids), *(len(branch.token_ids) for branch in earlier), 0)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model wrote."""
        return len(self.logprobs)

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """The spans of sampled tokens in the response."""
        return ((0, len(self.token_ids)),) if self.episode is None else self.episode.turns


def scattered_seed(seed: int, count: int) -> int:
    """Return the seed of request number `count` of a run: below 2^31, and different for 2^31 consecutive requests.

    The count is multiplied by an odd number (Knuth's, of the golden ratio), which maps counts one to one.
    """
    return (zlib.crc32(str(seed).encode()) + count) * 2_654_435_761 % (1 << 31)
