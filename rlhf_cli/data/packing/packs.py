"""Flat packs of token sequences without padding, and the assignment of sequences to micro-batches and ranks.

Packs with shared prefixes are in `prefix_packing`; the sequences per optimizer step are chosen in `sampling`.
"""

import collections.abc
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from rlhf_cli.data.packing.loss_weights import WEIGHTS, joined_weights
from rlhf_cli.data.packing.placing_pictures import TokenRun, place_pictures
from rlhf_cli.data.packing.routed_experts import joined_experts
from rlhf_cli.data.stored_arrays import Column, StoredArray
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import PackPictures, PlacedPicture

_EXACT_SEARCH_SEQUENCES = 32
"""Maximum number of sequences for an exact search of the fewest micro-batches, if heuristics need more."""
_EXACT_SEARCH_NODES = 20_000
"""Maximum placements tried in that search, about 20 ms."""
TOKEN_IDS = "token_ids"
"""Name of the tokens in `TokenSequence.stored`."""
PATCHES_PER_TOKEN = 4
"""Image patches that count as one token of micro-batch room. A token has 4 patches in Qwen-VL, 1 in LLaVA, and 9 to 16
in SmolVLM, whose vision encoder computes several times as many patches at the same limit.
"""


@dataclass(frozen=True)  # slots would slow down pickling, and thousands are sent per iteration
class TokenSequence:
    """One tokenized sequence, for a forward pass or for training.

    - `token_ids`: int32 `[L]`.
    - `loss_mask`: bool `[L]`, True for training targets. The first token is never one: nothing predicts it.
    - `pictures`: images in token order; none of their tokens is a target.
    - `columns`: float32 `[K]` by name, one value per target: `rollout_logprobs`, `advantages`, `old_logprobs` and
      `ROLE_logprobs` of KL terms for the policy, `old_values` and `returns` for the critic, `labels` for a process
      reward model, `weights` for rows with loss weights. Empty for a forward pass.
    - `routed_experts`: experts that the rollout engine chose for the first n tokens, uint8 or uint16 `[n, layers,
      top_k]`; None without routing replay.
    - `teacher`: number of the teacher that scores the sequence.
    - `teacher_reads`: what that teacher reads instead; None if it reads this sequence.
    - `teacher_rows`: targets at the same positions of the text, int64 `[n, 4]`: number here, number there, and the
      tokens here and there up to the next common position, 0 if that is unknown. None if the targets are equal.
    - `stored`: `TOKEN_IDS`, and columns that are not in `columns`, in the object store that ranks read
      (`backends/roles/serialization.py`). Empty if all is sent with the sequence.

    Example: a prompt of two tokens and a response of three, trained with advantage 0.5:

        TokenSequence(
            token_ids=[7, 8, 4, 5, 2],
            loss_mask=[False, False, True, True, True],
            columns={"rollout_logprobs": [-0.1, -0.7, -0.2], "advantages": [0.5, 0.5, 0.5]},
        )  # L = 5, K = 3
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    pictures: tuple[PlacedPicture, ...] = ()
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    teacher: int = 0
    teacher_reads: "TokenSequence | None" = None
    teacher_rows: np.ndarray | None = None
    stored: dict[str, StoredArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.loss_mask.shape, "token_ids and loss_mask differ in length"
        assert self.token_ids.size > 0, "a sequence has at least one token"
        assert not self.loss_mask[0], "the first token of a sequence is not a target"

    def __len__(self) -> int:
        return self.token_ids.size

    @property
    def all_columns(self) -> dict[str, Column]:
        """`columns`, and those in the object store."""
        return {**self.columns, **{name: array for name, array in self.stored.items() if name != TOKEN_IDS}}

    @property
    def num_trained(self) -> int:
        """Number of training targets."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def patches(self) -> int:
        """Number of image patches for the vision encoder."""
        return sum(placed.patches for placed in self.pictures)


@dataclass(frozen=True)
class KeyBounds:
    """Keys that each run of tokens attends to, if several runs continue one prefix.

    `index_U` are positions in the pack: for each run, its prefix, then its own. `cu_seqlens` [S + 1] are the bounds per
    run.
    """

    index_U: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


@dataclass(frozen=True)
class Pack:
    """One micro-batch: B concatenated sequences with T tokens, K of them training targets.

    - `rows_K`: positions of hidden states used to predict `targets_K`; `cu_trained` [B + 1] are the bounds per
      sequence.
    - `read_R`: the same positions, sorted and unique.
    - `cu_seqlens` [S + 1]: bounds of runs that attend together: sequences, or with `keys` prefixes and continuations
      (`pack_trees`).
    - `routed_experts`: experts to replay, int16 [T, layers, top_k], -1 where the router chooses; None without replay.
    - `weights_K`: loss weights of the targets, float32; None if all are 1.
    - `host`: the same pack in host memory, if this one is on a GPU. Positions are computed from it without waiting for
      the GPU.

    An idle pack (`num_sequences` 0) has one dummy token for attention kernels that require one, and no target:
    `cu_trained` is [0].

    Example: sequences [5, 6, 7] (targets 6 and 7) and [8, 9] (target 9) give `input_ids_T` [5, 6, 7, 8, 9],
    `cu_seqlens` [0, 3, 5], `rows_K` [0, 1, 3], `targets_K` [6, 7, 9] and `cu_trained` [0, 2, 3]: B = 2, T = 5, K = 3.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    rows_K: torch.Tensor
    read_R: torch.Tensor
    targets_K: torch.Tensor
    cu_trained: torch.Tensor
    keys: KeyBounds | None = None
    pictures: PackPictures | None = None
    routed_experts: torch.Tensor | None = None
    weights_K: torch.Tensor | None = None
    host: "Pack | None" = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the pack, 0 for an idle pack."""
        return self.cu_trained.numel() - 1

    def to(self, device: torch.device | str) -> "Pack":
        """Move the pack to a device."""
        moved = _tensors_to(self, device)
        keys = self.keys and replace(self.keys, **_tensors_to(self.keys, device))
        host = None if moved["input_ids_T"].device.type == "cpu" else self.host or self
        return replace(self, **moved, keys=keys, pictures=self.pictures and self.pictures.to(device), host=host)


def _tensors_to(record: Pack | KeyBounds, device: torch.device | str) -> dict[str, torch.Tensor]:
    values = {column.name: getattr(record, column.name) for column in fields(record)}
    # non_blocking has an effect only for pinned memory, and is harmless otherwise.
    return {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, torch.Tensor)}


def pack(sequences: list[TokenSequence]) -> Pack:
    """Concatenate the sequences in order. An empty list gives the idle pack.

    A rank without work runs the idle pack to participate in collectives.
    """
    # The idle pack has one dummy token, because varlen kernels reject empty input.
    lengths = np.array([len(sequence) for sequence in sequences] or [1], dtype=np.int64)
    # int64, as embedding lookups expect.
    token_ids = np.concatenate([sequence.token_ids for sequence in sequences] or [np.zeros(1)]).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    trained = [np.flatnonzero(s.loss_mask) + start for s, start in zip(sequences, bounds[:-1], strict=False)]
    cu_trained = np.cumsum([0] + [positions.size for positions in trained])
    trained_K = np.concatenate(trained or [np.zeros(0)]).astype(np.int64)
    return Pack(
        input_ids_T=torch.from_numpy(token_ids),
        position_ids_T=torch.from_numpy(np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)),
        # Attention kernels require int32 bounds.
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        # The hidden state before a token predicts it.
        rows_K=torch.from_numpy(trained_K - 1),
        read_R=torch.from_numpy(trained_K - 1),
        targets_K=torch.from_numpy(token_ids[trained_K]),
        cu_trained=torch.from_numpy(cu_trained.astype(np.int64)),
        pictures=_pictures_of(sequences),
        routed_experts=joined_experts([(len(sequence), sequence.routed_experts) for sequence in sequences]),
        weights_K=joined_weights([(sequence.num_trained, sequence.columns.get(WEIGHTS)) for sequence in sequences]),
    )


def _pictures_of(sequences: list[TokenSequence]) -> PackPictures | None:
    if not any(sequence.pictures for sequence in sequences):
        return None
    return place_pictures([TokenRun(sequence.token_ids, pictures=sequence.pictures) for sequence in sequences])


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences with the values that their loss reads.

    `columns` by name: float32 `[K]` in the order of the pack's targets, or one row per pair, `[P]` or `[P, 2]` with the
    chosen response first.

    Example: two sequences with 2 and 1 targets: `pack.cu_trained = [0, 2, 3]`, `columns["advantages"].shape == (3,)`.
    """

    pack: Pack
    columns: dict[str, torch.Tensor]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the micro-batch on another device."""
        return MicroBatch(self.pack.to(device), {name: column.to(device) for name, column in self.columns.items()})

    def with_column(self, name: str, column: torch.Tensor) -> "MicroBatch":
        """Return the micro-batch with one more column."""
        return replace(self, columns=self.columns | {name: column})


def micro_batch(
    sequences: list[TokenSequence],
    *,
    names: tuple[str, ...],
    pack_sequences: Callable[[list[TokenSequence]], Pack] = pack,
) -> MicroBatch:
    """Return the sequences packed in order with the named columns; an empty list gives an idle pack and empty
    columns.
    """
    columns = {
        name: torch.from_numpy(np.concatenate([s.columns[name] for s in sequences] or [np.zeros(0, np.float32)]))
        for name in names
    }
    return MicroBatch(pack_sequences(sequences), columns)


def only_end(sequence: TokenSequence) -> TokenSequence:
    """Return the sequence with its last token as the only target."""
    return replace(sequence, loss_mask=np.arange(len(sequence)) == len(sequence) - 1)


def at_targets(batch: Pack) -> Pack:
    """Read the pack at its targets instead of at the tokens before them."""
    host = batch.host and at_targets(batch.host)
    return replace(batch, rows_K=batch.rows_K + 1, read_R=batch.read_R + 1, host=host)


def plan_packs(
    lengths: collections.abc.Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    num_ranks: int,
    patches: collections.abc.Sequence[int] | np.ndarray | None = None,
    max_sequences: int | None = None,
    quadratic_cost: float = 0.0,
    costs: collections.abc.Sequence[float] | None = None,
) -> list[list[list[int]]]:
    """Assign sequences to ranks and micro-batches: `plan[rank][micro_batch]` is a list of indices.

    - Each index occurs exactly once.
    - A micro-batch has at most `max_tokens` tokens and `max_sequences` sequences. With image `patches`, sequences count
      with `room_of`.
    - All ranks have the same number of micro-batches, the fewest found. With fewer sequences than micro-batches, some
      are idle.
    - The cost per sequence, `L + quadratic_cost * L^2` or `costs`, is balanced between concurrent micro-batches and
      over rank sums.
    - The most expensive micro-batches come first, so that running out of memory shows immediately.
    - The plan depends only on the arguments.

    Raises:
        UsageError: a single sequence exceeds the token limit.
    """
    lengths_B = np.asarray(lengths, dtype=np.int64)
    if lengths_B.size == 0:
        return [[] for _ in range(num_ranks)]
    if lengths_B.max() > max_tokens:
        raise UsageError(
            f"a sequence of {lengths_B.max()} tokens does not fit into a micro-batch of {max_tokens}: "
            f"raise train_max_tokens_per_gpu to {lengths_B.max()} or more, or lower max_len"
        )
    rooms_B = lengths_B if patches is None else room_of(lengths_B, np.asarray(patches), max_tokens=max_tokens)
    costs_B = lengths_B + quadratic_cost * lengths_B.astype(np.float64) ** 2 if costs is None else np.array(costs)
    # Without a limit on sequences, all may share a micro-batch.
    bins = _fewest_bins(rooms_B, costs_B, Bounds(max_tokens, max_sequences or lengths_B.size), num_ranks)
    return _deal(bins, costs_B, num_ranks)


def room_of(tokens_B: np.ndarray, patches_B: np.ndarray, *, max_tokens: int) -> np.ndarray:
    """Return the room of sequences in a micro-batch: tokens, or patches in units of `PATCHES_PER_TOKEN`.

    A sequence with more patches than fit occupies a full micro-batch, because images cannot be split.
    """
    # Round up: part of a token takes a whole one.
    by_patches_B = np.minimum(-(-patches_B // PATCHES_PER_TOKEN), max_tokens)
    return np.maximum(tokens_B, by_patches_B)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Maximum tokens and sequences per micro-batch."""

    tokens: int
    sequences: int


def _fewest_bins(lengths_B: np.ndarray, costs_B: np.ndarray, bounds: Bounds, num_ranks: int) -> list[list[int]]:
    """Return balanced bins. Their number is a multiple of `num_ranks`, the smallest found by heuristics and bounded
    search.
    """
    num_bins = -(-_least_bins(lengths_B, bounds) // num_ranks) * num_ranks
    # Longest first, ties by index: the plan must not depend on the sort algorithm.
    order = np.lexsort((np.arange(lengths_B.size), -lengths_B))
    while True:
        # Try balanced bins first, because concurrent micro-batches should take equally long.
        bins = _fill_balanced(order, lengths_B, costs_B, bounds, num_bins)
        if bins is not None:
            return bins
        tight = _fill_tight(order, lengths_B, bounds, num_bins) or _search(order, lengths_B, bounds, num_bins)
        if tight is not None:
            return _rebalance(tight, lengths_B, costs_B, bounds)
        # All ranks need the same number of micro-batches, so add one per rank.
        num_bins += num_ranks


def _least_bins(lengths_B: np.ndarray, bounds: Bounds) -> int:
    """Return a lower bound on the number of bins: L2 of Martello and Toth (Knapsack Problems, 1990, section 8.3)."""
    ascending = np.sort(lengths_B)
    sums = np.concatenate([[0], np.cumsum(ascending)])
    thresholds = np.concatenate([[0], np.unique(ascending[2 * ascending <= bounds.tokens])])
    # Sequences above half the limit need a bin each.
    half = np.searchsorted(ascending, bounds.tokens // 2, side="right")
    first_large = np.maximum(np.searchsorted(ascending, bounds.tokens - thresholds, side="right"), half)
    first_small = np.searchsorted(ascending, thresholds, side="left")
    room_beside_mid = (first_large - half) * bounds.tokens - (sums[first_large] - sums[half])
    overflow = np.maximum(sums[half] - sums[first_small] - room_beside_mid, 0)
    by_tokens = ascending.size - half + -(-overflow // bounds.tokens)
    return int(max(by_tokens.max(), -(-ascending.size // bounds.sequences)))


def _fill_balanced(
    order: np.ndarray, lengths_B: np.ndarray, costs_B: np.ndarray, bounds: Bounds, num_bins: int
) -> list[list[int]] | None:
    """Assign sequences by decreasing length to the cheapest bin with room; None if one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    bin_costs = np.zeros(num_bins)
    room = np.full(num_bins, bounds.tokens)
    for index in order:
        length = lengths_B[index]
        # argmin takes the first of equally cheap bins, so the plan is deterministic.
        chosen = int(np.where(room >= length, bin_costs, np.inf).argmin())
        if room[chosen] < length:
            return None
        bins[chosen].append(int(index))
        bin_costs[chosen] += costs_B[index]
        room[chosen] -= length
        if len(bins[chosen]) == bounds.sequences:
            # -1 marks a bin with the maximum number of sequences.
            room[chosen] = -1
    return bins


def _fill_tight(order: np.ndarray, lengths_B: np.ndarray, bounds: Bounds, num_bins: int) -> list[list[int]] | None:
    """Best-fit decreasing: assign sequences by decreasing length to the bin with the least sufficient room. None if one
    does not fit.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # Sorted by room, so that bisect finds the tightest bin.
    open_bins = [(bounds.tokens, number) for number in range(num_bins)]
    for index, length in zip(order.tolist(), lengths_B[order].tolist(), strict=True):
        place = bisect_left(open_bins, (length, -1))
        if place == len(open_bins):
            return None
        room, number = open_bins.pop(place)
        bins[number].append(index)
        if len(bins[number]) < bounds.sequences:
            insort(open_bins, (room - length, number))
    return bins


def _search(order: np.ndarray, lengths_B: np.ndarray, bounds: Bounds, num_bins: int) -> list[list[int]] | None:
    """Search depth-first for any assignment to `num_bins` bins; None if there is none or the search is too large."""
    if order.size > _EXACT_SEARCH_SEQUENCES:
        return None
    rooms = [bounds.tokens] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    nodes = 0

    def place(depth: int) -> bool:
        nonlocal nodes
        if depth == order.size:
            return True
        index, length = int(order[depth]), int(lengths_B[order[depth]])
        tried = set()
        for number, room in enumerate(rooms):
            # Bins with equal room and count are interchangeable, so try only one of them.
            alike = (room, len(bins[number]))
            if room < length or alike[1] == bounds.sequences or alike in tried or nodes > _EXACT_SEARCH_NODES:
                continue
            tried.add(alike)
            nodes += 1
            rooms[number] -= length
            bins[number].append(index)
            if place(depth + 1):
                return True
            rooms[number] += length
            bins[number].pop()
        return False

    return bins if place(0) else None


def _rebalance(bins: list[list[int]], lengths_B: np.ndarray, costs_B: np.ndarray, bounds: Bounds) -> list[list[int]]:
    """Move sequences from the most to the least expensive bin while this narrows the gap. Fills empty bins first."""
    bin_costs = np.array([costs_B[members].sum() for members in bins])
    # Each move narrows the gap, and the limit bounds the time.
    for _ in range(2 * len(bins)):
        low, high = int(bin_costs.argmin()), int(bin_costs.argmax())
        if not bins[low]:
            # An empty bin would be an idle micro-batch, so take from a bin with several sequences.
            high = max(range(len(bins)), key=lambda number: (len(bins[number]) > 1, bin_costs[number]))
        room = bounds.tokens - lengths_B[bins[low]].sum()
        gap = bin_costs[high] - bin_costs[low]
        movable = [i for i in bins[high] if lengths_B[i] <= room and costs_B[i] < gap]
        if not movable or len(bins[low]) == bounds.sequences:
            break
        # The best move is half the gap.
        moved = min(movable, key=lambda i: (abs(gap / 2 - costs_B[i]), i))
        bins[high].remove(moved)
        bins[low].append(moved)
        bin_costs[high] -= costs_B[moved]
        bin_costs[low] += costs_B[moved]
    return bins


def _deal(bins: list[list[int]], costs_B: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    """Distribute bins to ranks: bins with similar cost run concurrently, and the most expensive goes to the rank with
    the lowest sum.
    """
    bin_costs = [float(costs_B[members].sum()) for members in bins]
    by_cost = sorted(range(len(bins)), key=lambda number: (-bin_costs[number], number))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    rank_costs = [0.0] * num_ranks
    for start in range(0, len(bins), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (rank_costs[rank], rank))
        for rank, number in zip(ranks, by_cost[start : start + num_ranks], strict=True):
            # Sorted, so that the order within a micro-batch is that of the items.
            plan[rank].append(sorted(bins[number]))
            rank_costs[rank] += bin_costs[number]
    return plan
