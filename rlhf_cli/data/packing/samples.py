"""What policy and critic learn from: sequences with a value for each trained token, packed alike."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack


@dataclass(frozen=True)  # no slots, for the reason given at Sequence
class Sample:
    """One response with the values of each of its trained tokens.

    Every column is float32 [number of trained tokens]: `old_logprobs`, `advantages` and so on.
    """

    sequence: TokenSequence
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class SamplePack:
    """A packed micro-batch of samples; columns are float32 [K], in the order of the pack's targets."""

    pack: Pack
    columns: dict[str, torch.Tensor]

    def to(self, device: torch.device | str) -> "SamplePack":
        """Return the micro-batch on another device."""
        return SamplePack(self.pack.to(device), {k: v.to(device) for k, v in self.columns.items()})


def pack_samples(
    samples: list[Sample], *, names: tuple[str, ...], pack_sequences: Callable[[list[TokenSequence]], Pack] = pack
) -> SamplePack:
    """Return the samples packed in their order with the named columns; no samples give an idle micro-batch with empty
    columns.
    """
    columns = {
        name: torch.from_numpy(np.concatenate([s.columns[name] for s in samples] or [np.zeros(0, np.float32)]))
        for name in names
    }
    return SamplePack(pack_sequences([sample.sequence for sample in samples]), columns)
