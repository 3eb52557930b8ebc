"""Precomputes a frozen model's results for a dataset, and digests to identify the items."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from rlhf_cli.data.packing.prefix_packing import Continuation
from rlhf_cli.trainers.offline.kto import LabelledItems
from rlhf_cli.trainers.offline.loop import ItemData, Share
from rlhf_cli.trainers.offline.pairs import Gather, PairItems


class ReferenceQuery(Protocol):
    """A model for inference only."""

    def infer(
        self, batches: list[object], forward: Callable[[torch.nn.Module, object], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the result of `forward` for each micro-batch."""


def all_results(
    model: ReferenceQuery,
    forward: Callable[[torch.nn.Module, Any], torch.Tensor],
    items: ItemData,
    *,
    share: Share,
    gather: Gather,
) -> np.ndarray:
    """Return the results of `forward` for all items on all ranks: float32 [N], or [N, n] for n numbers per item."""
    num_items, size = len(items.lengths), share.batch.train_batch_size
    found: list[torch.Tensor] = []
    # Use training-sized batches, as in the loop, to limit memory.
    for start in range(0, num_items, size):
        dealt = share.deal(items, np.arange(start, min(start + size, num_items)))
        results = model.infer([items.collate(members) for members in dealt], forward)
        found += [_numbered(members, result) for members, result in zip(dealt, results, strict=True)]
    rows_R2, _ = gather(torch.cat(found))
    # Ranks process items in packing order, so restore the item order. A stable sort keeps the order of several numbers
    # per item.
    order_R = rows_R2[:, 0].argsort(stable=True)
    results_ND = rows_R2[order_R, 1].float().numpy().reshape(num_items, -1)
    return results_ND.squeeze(1) if results_ND.shape[1] == 1 else results_ND


def _numbered(members: list[int], result: torch.Tensor) -> torch.Tensor:
    """Return each number with its item index, float64 [R, 2].

    One number per row: a rank without items does not know the number of results per item. float64 represents item
    indices exactly.
    """
    items_R = np.repeat(np.array(members, dtype=np.float64), len(result) // max(len(members), 1))
    return torch.stack([torch.from_numpy(items_R), result.double()], dim=1)


def digest_of_pairs(items: PairItems) -> str:
    """Hash the tokens in order."""
    pairs = items.data.items
    return _digest(part for pair in pairs for part in (pair.prompt_ids, *_parts(pair.chosen, pair.rejected)))


def digest_of_responses(items: LabelledItems) -> str:
    """Hash the tokens in order."""
    return _digest(part for item in items.data.items for part in (item.prompt_ids, *_parts(item.response)))


def _parts(*continuations: Continuation) -> list[np.ndarray]:
    return [part for continuation in continuations for part in (continuation.token_ids, continuation.loss_mask)]


def _digest(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Include the size, so that moving a token between neighboring arrays changes the digest.
        digest.update(f"{part.size} ".encode() + part.tobytes())
    return digest.hexdigest()
