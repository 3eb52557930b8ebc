"""Draws tokens from logits with one uniform number per row, and reports their log-probs.

Leaves out where the logits and the numbers come from.
"""

import torch

from rlhf_cli.data.rollouts import SamplingParams

_ELEMENTS_PER_CHUNK = 1 << 24  # rows x vocabulary worked on at once: 128 MiB of float64


def request_uniforms(seeds: list[int], num_tokens: int) -> torch.Tensor:
    """Uniform numbers [requests, num_tokens] in [0, 1), float64: row i depends on seed i alone.

    Step t of a request always takes number t, so that a draw does not depend on which other requests are
    generated beside it. float64, since float32 could not reach tokens with a probability below 6e-8.
    """
    uniforms = torch.empty(len(seeds), num_tokens, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        uniforms[row].uniform_(generator=generator.manual_seed(seed))
    return uniforms


def processed_logprobs(logits_BV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs [B, V] float32 of the distribution that is sampled from; -inf outside the top-p set.

    Greedy decoding reports the log-probs at temperature 1, like vLLM.
    """
    logits_BV = logits_BV.float()
    if sampling.greedy:
        return logits_BV.log_softmax(-1)
    logprobs_BV = (logits_BV / sampling.temperature).log_softmax(-1)
    if sampling.top_p >= 1:
        return logprobs_BV
    ascending, order = logprobs_BV.sort(dim=-1)
    outside = ascending.exp().cumsum(-1) <= 1 - sampling.top_p
    outside[:, -1] = False  # the likeliest token always stays
    masked = ascending.masked_fill(outside, -torch.inf).log_softmax(-1)
    return torch.empty_like(masked).scatter_(-1, order, masked)


def sample_tokens(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] int64 and their log-probs [B] float32.

    A token is the first one whose cumulative probability exceeds the row's uniform number (inverse transform
    sampling): one number per row is drawn instead of one per entry of the vocabulary.
    """
    rows = max(1, _ELEMENTS_PER_CHUNK // logits_BV.shape[-1])
    parts = [
        _sample_chunk(logits, uniforms, sampling)
        for logits, uniforms in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_chunk(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_BV = processed_logprobs(logits_BV, sampling)
    if sampling.greedy:
        tokens_B1 = logprobs_BV.argmax(-1, keepdim=True)
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
        # times the last entry: rounding leaves the sum a little off 1, and no draw may fall behind it
        threshold_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
        tokens_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
        tokens_B1.clamp_(max=logprobs_BV.shape[-1] - 1)
    return tokens_B1[:, 0], logprobs_BV.gather(-1, tokens_B1)[:, 0]
