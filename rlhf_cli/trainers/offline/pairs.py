"""Preference pairs as items for the offline loop, for `rm` and `dpo`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.ragged import segment_sum
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import MicroBatch, Pack
from rlhf_cli.data.packing.prefix_packing import Tree, pack_trees
from rlhf_cli.data.preference_data import Pair
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.offline.loop import LoadedItems

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, int]]
"""Rows of this rank -> rows of all ranks in rank order, and this rank's start index. Ranks may have different numbers
of rows. Call it on all ranks.
"""


@dataclass(frozen=True)
class PairItems(LoadedItems[Pair]):
    """Tokenized pairs, one per item. `num_trained` counts the trained tokens of both responses.

    - `share_prompts`: whether both responses of a pair share one prompt in the pack.
    - `read_ends`: whether to read the state after each response instead of the states that predict trained tokens.
    - `columns`: float32 [N] or [N, 2] for N pairs.
    """

    share_prompts: bool
    read_ends: bool
    columns: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per pair in a pack."""
        # Without sharing, each response has a separate copy of the prompt.
        columns = self.data.columns
        prompts = columns["prompt_length"] * (1 if self.share_prompts else 2)
        return prompts + columns["chosen_length"] + columns["rejected_length"]

    def collate(self, indices: Sequence[int]) -> MicroBatch:
        """Pack the pairs into one micro-batch: chosen, rejected, chosen, rejected, and so on."""
        # The objectives rely on this order: they take every second sequence as chosen.
        trees = [tree_of(self.data.items[index]) for index in indices]
        packed = pack_trees(trees, share_prompts=self.share_prompts, read_ends=self.read_ends)
        chosen = np.array(indices, dtype=np.int64)
        return MicroBatch(packed, {name: torch.from_numpy(column[chosen]) for name, column in self.columns.items()})


def tree_of(pair: Pair) -> Tree:
    """Return a pair as a prompt with two continuations, chosen first."""
    return Tree(pair.prompt_ids, (pair.chosen, pair.rejected), pair.pictures)


def sequence_logprobs(model: nn.Module, pack: Pack) -> torch.Tensor:
    """Return log-probs per sequence in a pack, float32 [B], summed over trained tokens, in nats."""
    return segment_sum(model(pack)[0], pack.cu_trained)


def trained_counts(pack: Pack) -> torch.Tensor:
    """Return trained tokens per sequence in a pack, float32 [B]."""
    return pack.cu_trained.diff().float()


def margins(data: LoadedData[Pair]) -> np.ndarray:
    """Return the margin per pair, float32 [N]. Raises UsageError if a pair has none."""
    found = [pair.margin for pair in data.items]
    missing = sum(margin is None for margin in found)
    if missing:
        raise UsageError(f"margin_loss: {missing:,} of {len(found):,} pairs have no margin (column `margin`)")
    return np.array(found, dtype=np.float32)
