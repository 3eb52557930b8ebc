"""Records of generation: requests to a rollout engine, and its responses."""

import zlib
from dataclasses import dataclass
from typing import Literal

from rlhf_cli.config.generate import ResponseSamplingConfig
from rlhf_cli.models.vision.pictures import PlacedPicture


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled. Log-probs that come back are of the distribution that tokens are drawn from.

    The order is vLLM's: `repetition_penalty`, `temperature`, `min_p`, `top_k` (0 for all tokens), `top_p`. Greedy
    sampling takes the likeliest token after the penalty alone. `stop` are texts that end a response as soon as one of
    them is in it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    stop: tuple[str, ...] = ()


def sampling_params(sampling: ResponseSamplingConfig) -> SamplingParams:
    """Return the settings as engines take them."""
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
    )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample. The same request gives the same response from the same weights.

    `expected_tokens` is a guess of the response's length, by which engines are loaded evenly; it changes no response.
    `prompt_ids` have the whole run of each of the `pictures`.
    """

    prompt_ids: list[int]
    seed: int
    expected_tokens: int = 0
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def prompt(self) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """The part that the samples of a prompt have in common: equal tokens with other pictures are another prompt."""
        return tuple(self.prompt_ids), self.pictures


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response.

    `token_ids` are exactly the sampled tokens, up to and with the end-of-sequence token or the token that completed a
    stop string. `logprobs` (nats, same length) are the sampler's own. `finish_reason` is "stop" for such an end and
    "length" for a response cut at the limit. `weight_version` counts weight pushes, 0 for the initial weights.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int


def scattered_seed(seed: int, count: int) -> int:
    """Return the seed of request number `count` of a run: below 2^31, and different for 2^31 consecutive requests.

    The count is multiplied by an odd number (Knuth's, of the golden ratio), which maps counts one to one.
    """
    return (zlib.crc32(str(seed).encode()) + count) * 2_654_435_761 % (1 << 31)
