"""Draws tokens from logits with one uniform number per row, and reports their log-probs.

The logits and the random numbers are arguments.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from rlhf_cli.data.rollouts import SamplingParams

_ELEMENTS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}  # rows x vocabulary: 1 MiB stays in a core's cache
_BLOCK = 64  # entries of the vocabulary summed before the cumulative sum is taken


def request_uniforms(seeds: list[int], num_tokens: int) -> torch.Tensor:
    """Return uniform numbers [requests, num_tokens] in [0, 1), float64: row i depends on seed i alone.

    Step t of a request always takes number t, so that a draw does not depend on which other requests are
    generated beside it. float64, since float32 could not reach tokens with a probability below 6e-8.
    """
    uniforms = torch.empty(len(seeds), num_tokens, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        uniforms[row].uniform_(generator=generator.manual_seed(seed))
    return uniforms


def sample_tokens(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingParams, *, seen_BV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [B] int64 and their log-probs [B] float32 under the distribution they were drawn from.

    `seen_BV` marks the tokens of each row's prompt and response, for the repetition penalty. A token is the first one
    whose cumulative probability exceeds the row's uniform number (inverse transform sampling): one number per row is
    drawn instead of one per entry of the vocabulary. Greedy decoding takes the likeliest token and reports its log-prob
    at temperature 1, as vLLM does.
    """
    rows = max(1, _ELEMENTS_PER_CHUNK[logits_BV.device.type] // logits_BV.shape[-1])
    chunks = logits_BV.split(rows)
    seen: Sequence[torch.Tensor | None] = [None] * len(chunks) if seen_BV is None else seen_BV.split(rows)
    parts = [
        _sample_chunk(processed_logits(logits.float(), sampling, seen_BV=marks), uniforms, sampling)
        for logits, uniforms, marks in zip(chunks, uniforms_B.split(rows), seen, strict=True)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_chunk(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    highest_B1 = logits_BV.amax(-1, keepdim=True)
    weights_BV = (logits_BV - highest_B1).exp_()
    blocks = _blocks(weights_BV)
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    if sampling.greedy:
        tokens_B1 = logits_BV.argmax(-1, keepdim=True)
    else:
        tokens_B1 = _draw(blocks, cumulative, uniforms_B[:, None])
    logprobs_B1 = logits_BV.gather(-1, tokens_B1) - highest_B1 - cumulative[:, -1:].log().float()
    return tokens_B1[:, 0], logprobs_B1[:, 0]


def processed_logits(
    logits_BV: torch.Tensor, sampling: SamplingParams, *, seen_BV: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 logits of the distribution that tokens are drawn from, made in vLLM's order."""
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None, "a repetition penalty needs the tokens of prompt and response"
        logits_BV = penalized(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.greedy:
        return logits_BV
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if sampling.min_p > 0:
        logits_BV = keep_min_p(logits_BV, sampling.min_p)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV = keep_top_k(logits_BV, sampling.top_k)
    return keep_top_p(logits_BV, sampling.top_p) if sampling.top_p < 1 else logits_BV


def penalized(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return the logits, of seen tokens divided by the penalty if above 0 and multiplied with it if below."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def keep_min_p(logits_BV: torch.Tensor, min_p: float) -> torch.Tensor:
    """Return the logits with -inf for tokens less likely than this share of the likeliest token's probability."""
    probabilities_BV = logits_BV.softmax(-1)
    least_B1 = min_p * probabilities_BV.amax(-1, keepdim=True)
    return logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)


def keep_top_k(logits_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the logits with -inf for tokens less likely than number `top_k`; tokens as likely as that one stay."""
    least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def keep_top_p(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the logits with -inf outside the smallest set of tokens whose probability reaches `top_p`."""
    ascending, order = logits_BV.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    outside[:, -1] = False  # the likeliest token always stays
    return logits_BV.masked_fill(torch.empty_like(outside).scatter_(-1, order, outside), -torch.inf)


def _blocks(weights_BV: torch.Tensor) -> torch.Tensor:
    """Return the weights [B, blocks, _BLOCK], filled up with zeros."""
    weights_BV = pad(weights_BV, (0, -weights_BV.shape[-1] % _BLOCK))
    return weights_BV.view(len(weights_BV), -1, _BLOCK)


def _draw(blocks: torch.Tensor, cumulative: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """Return the index [B, 1] of the first weight whose cumulative sum exceeds the uniform share of the total.

    Looks for the block first, then inside it: a cumulative sum over the whole vocabulary costs more than all else.
    Weights of zero are never drawn, as the sum does not grow there.
    """
    zero = cumulative.new_zeros(())
    total = cumulative[:, -1:]
    threshold = torch.minimum(uniforms_B1 * total, total.nextafter(zero))  # rounding must not reach the total
    block = torch.searchsorted(cumulative, threshold, right=True)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    inside = chosen.cumsum(-1, dtype=torch.float64)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    # rounding may put the rest behind the block's own sum: it belongs to the last weight that is not zero
    rest = torch.minimum(threshold - before, inside[:, -1:].nextafter(zero))
    return block * _BLOCK + torch.searchsorted(inside, rest, right=True)
