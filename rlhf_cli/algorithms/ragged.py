"""Vectorized reductions and scans over the segments of a flat tensor.

`x_N` concatenates the tokens of all sequences, without padding. `cu` (int64 `[B+1]`, from 0 to N) marks the segment
boundaries; segments may be empty. Computation is in float64; results have the input dtype.

Example: three sequences of 2, 0 and 3 tokens give N = 5 and `cu = [0, 2, 2, 5]`.
"""

import torch
from torch import Tensor

# Tokens per scan row. Shorter rows need more levels; longer rows need more arithmetic and, for short responses, more
# padding. Among 8 to 128, 16 and 32 were the fastest for responses of 20 to 20,000 tokens.
_SCAN_ROW = 32


def segment_lengths(cu: Tensor) -> Tensor:
    """Return the number of tokens per segment, int64 `[B]`."""
    return cu[1:] - cu[:-1]


def segment_ids(cu: Tensor, num_tokens: int) -> Tensor:
    """Return the segment index of each of the `num_tokens` tokens, int64 `[N]`."""
    lengths_B = segment_lengths(cu)
    # Without the size of its result, the operator would wait for a GPU to add the lengths up.
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=cu.device), lengths_B, output_size=num_tokens)


def last_index(cu: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices of non-empty segments, position of the last token in each), both int64."""
    occupied = torch.nonzero(segment_lengths(cu)).squeeze(1)
    return occupied, cu[occupied + 1] - 1


def segment_sum(x_N: Tensor, cu: Tensor) -> Tensor:
    """Sum each segment, `[B]`; 0 for an empty one."""
    # segment_reduce adds in a fixed order. scatter_add uses atomics on a GPU, so repeated runs would differ.
    sums_B = torch.segment_reduce(x_N.double(), "sum", offsets=cu, initial=0.0)
    return sums_B.to(x_N.dtype)


def segment_mean(x_N: Tensor, cu: Tensor) -> Tensor:
    """Average each segment, `[B]`; 0 for an empty one."""
    sums_B = segment_sum(x_N.double(), cu)
    return (sums_B / segment_lengths(cu).clamp(min=1)).to(x_N.dtype)


def shift_left(x_N: Tensor, cu: Tensor, *, last_B: Tensor | None = None) -> Tensor:
    """Return `x_{t+1}` at token t within each segment; at the last token `last_B`, or 0 without it."""
    shifted_N = torch.roll(x_N, -1)
    occupied, ends = last_index(cu)
    shifted_N[ends] = 0 if last_B is None else last_B[occupied].to(x_N.dtype)
    return shifted_N


def suffix_scan(x_N: Tensor, cu: Tensor, decay: float) -> Tensor:
    """Compute `y_t = x_t + decay * y_{t+1}` within each segment, `[N]`, for 0 <= decay <= 1.

    Segments are split into rows of _SCAN_ROW tokens. Within a row, the scan is a matrix product with the triangular
    matrix of powers of `decay`. The carry from the next row is the same scan over the first values of all rows, with
    `decay ** _SCAN_ROW`. This needs N * _SCAN_ROW multiplications in one matrix product and log(longest segment) /
    log(_SCAN_ROW) levels, with no loop over tokens.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay of a suffix scan must be between 0 and 1, not {decay}")
    if x_N.numel() == 0:
        return x_N.clone()
    return _scan(x_N.double(), cu, float(decay)).to(x_N.dtype)


def suffix_scan_by_segment(x_N: Tensor, cu: Tensor, decay_B: Tensor) -> Tensor:
    """Compute `y_t = x_t + decay * y_{t+1}` with a decay per segment, `[N]`. Loops over the tokens of the longest."""
    scanned_N, carry_B = x_N.to(torch.float64, copy=True), x_N.new_zeros(len(decay_B), dtype=torch.float64)
    lengths_B = segment_lengths(cu)
    # Longest first, so that the segments with a token at a place are the first ones.
    order_B = lengths_B.argsort(descending=True, stable=True)
    starts_B, decay_B = cu[:-1][order_B], decay_B.double()[order_B]
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    counts = torch.bincount(lengths_B, minlength=longest + 1).flip(0).cumsum(0).flip(0).tolist()
    for place in range(longest - 1, -1, -1):
        count = counts[place + 1]
        at = starts_B[:count] + place
        carry_B[:count] = scanned_N[at] + decay_B[:count] * carry_B[:count]
        scanned_N[at] = carry_B[:count]
    return scanned_N.to(x_N.dtype)


def _scan(x_N: Tensor, cu: Tensor, decay: float) -> Tensor:
    lengths_B = segment_lengths(cu)
    longest = int(lengths_B.max())
    width = min(_SCAN_ROW, longest)
    cu_rows = torch.nn.functional.pad(torch.cumsum((lengths_B + width - 1) // width, 0), (1, 0))
    # Token t in segment b goes to slot t - cu[b] in the rows starting at cu_rows[b].
    slot_N = torch.arange(len(x_N), device=cu.device)
    slot_N += torch.repeat_interleave(cu_rows[:-1] * width - cu[:-1], lengths_B)
    rows = x_N.new_zeros(int(cu_rows[-1]) * width)
    rows[slot_N] = x_N
    within = rows.view(-1, width) @ _decay_matrix(width, decay, device=x_N.device)
    # Rows of one segment are consecutive, so the recursion scans row heads with the same function.
    if longest > width:
        heads = _scan(within[:, 0], cu_rows, decay**width)
        within += _powers(width, decay, device=x_N.device) * shift_left(heads, cu_rows).unsqueeze(1)
    return within.view(-1)[slot_N]


def _decay_matrix(width: int, decay: float, *, device: torch.device) -> Tensor:
    """Return `M[s, t] = decay ** (s - t)` for s >= t, else 0."""
    steps = torch.arange(width, device=device, dtype=torch.float64)
    distance = steps.unsqueeze(1) - steps.unsqueeze(0)
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=device), distance.clamp(min=0)).tril()


def _powers(width: int, decay: float, *, device: torch.device) -> Tensor:
    """Return `decay ** (width - t)` for token t in a row: its distance to the first token of the next row."""
    distance = torch.arange(width, 0, -1, device=device, dtype=torch.float64)
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=device), distance)
