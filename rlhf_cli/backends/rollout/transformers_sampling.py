"""Samples tokens from logits, with one uniform random number per row, and computes log-probs."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from rlhf_cli.data.rollouts import SamplingParams

# Rows x vocabulary per chunk. On a CPU, 1 MiB of float32 fits into a core's cache.
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
# Vocabulary entries per block. The cumulative sum runs over block sums first.
_BLOCK = 64


def request_uniforms(seeds: list[int], num_tokens: int) -> torch.Tensor:
    """Return uniform random numbers [requests, num_tokens] in [0, 1) as float64. Row i depends only on seed i.

    A request uses number t at step t, so samples do not depend on the other requests in the batch.
    """
    # float64, because float32 could not reach tokens with a probability below 6e-8.
    uniforms = torch.empty(len(seeds), num_tokens, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        uniforms[row].uniform_(generator=generator.manual_seed(seed))
    return uniforms


def sample_tokens(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingParams, *, seen_BV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [B] int64. Also returns log-probs [B] float32 under the sampling distribution.

    Uses inverse transform sampling: the sampled token is the first one for which the cumulative probability exceeds the
    row's uniform number. This needs one random number per row instead of one per vocabulary entry. Greedy decoding
    selects the most likely token and reports the log-prob at temperature 1, as in vLLM.

    `seen_BV` marks the tokens in each row's prompt and response, for the repetition penalty.
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
    """Return float32 logits for the sampling distribution."""
    # In vLLM's order: each step changes the input of the next.
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None, "a repetition penalty requires the tokens in prompt and response"
        logits_BV = _penalized(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.greedy:
        return logits_BV
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if sampling.min_p > 0:
        logits_BV = _keep_min_p(logits_BV, sampling.min_p)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV = _keep_top_k(logits_BV, sampling.top_k)
    return keep_top_p(logits_BV, sampling.top_p) if sampling.top_p < 1 else logits_BV


def _penalized(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Apply the repetition penalty to seen tokens: divide positive logits by it, multiply negative ones."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def _keep_min_p(logits_BV: torch.Tensor, min_p: float) -> torch.Tensor:
    """Set logits to -inf for tokens with a probability below `min_p` times the maximum probability."""
    probabilities_BV = logits_BV.softmax(-1)
    least_B1 = min_p * probabilities_BV.amax(-1, keepdim=True)
    return logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)


def _keep_top_k(logits_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    """Set logits to -inf outside the `top_k` most likely tokens. Ties with the last one are kept."""
    least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def keep_top_p(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set logits to -inf outside the smallest set of tokens with a total probability of at least `top_p`."""
    ascending, order = logits_BV.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    # Always keep the most likely token.
    outside[:, -1] = False
    return logits_BV.masked_fill(torch.empty_like(outside).scatter_(-1, order, outside), -torch.inf)


def _blocks(weights_BV: torch.Tensor) -> torch.Tensor:
    """Reshape weights to [B, blocks, _BLOCK], padded with zeros."""
    weights_BV = pad(weights_BV, (0, -weights_BV.shape[-1] % _BLOCK))
    return weights_BV.view(len(weights_BV), -1, _BLOCK)


def _draw(blocks: torch.Tensor, cumulative: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """Return the first index [B, 1] at which the cumulative weight exceeds the uniform fraction of the total.

    Searches for the block first, then inside it, because a cumulative sum over the full vocabulary would dominate the
    sampling time. Zero weights are never sampled, because the sum does not grow there.
    """
    zero = cumulative.new_zeros(())
    total = cumulative[:, -1:]
    # Rounding must not make the threshold equal to the total, because no sum exceeds the total.
    threshold = torch.minimum(uniforms_B1 * total, total.nextafter(zero))
    block = torch.searchsorted(cumulative, threshold, right=True)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    inside = chosen.cumsum(-1, dtype=torch.float64)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    # Rounding may push the rest beyond the block's sum. In this case, select the last nonzero weight.
    rest = torch.minimum(threshold - before, inside[:, -1:].nextafter(zero))
    return block * _BLOCK + torch.searchsorted(inside, rest, right=True)
