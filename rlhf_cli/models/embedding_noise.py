"""Noise on the input embeddings of packs (NEFTune, arXiv 2310.05914)."""

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from rlhf_cli.models.packs import PackLike, host_of


@dataclass(frozen=True)
class EmbeddingNoise:
    """Uniform noise in [-alpha / sqrt(L D), alpha / sqrt(L D)] on the D components of L embeddings of a sequence.

    It is a function of `seed`, `step` and the sequence's tokens, so neither packing, ranks nor a resume changes it.
    """

    alpha: float
    seed: int
    step: int

    def of(self, pack: PackLike, *, dimension: int) -> torch.Tensor:
        """Return the noise of a pack's tokens, float32 [T, D], on the pack's device."""
        host, device = host_of(pack), pack.input_ids_T.device
        bounds = pairwise(host.cu_seqlens.tolist())
        return torch.cat([self._noise(host.input_ids_T[start:stop], dimension, device) for start, stop in bounds])

    def _noise(self, token_ids_L: torch.Tensor, dimension: int, device: torch.device) -> torch.Tensor:
        key = f"{self.seed} {self.step} ".encode() + token_ids_L.numpy().tobytes()
        # Generators take seeds of 64 bits with a sign.
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        noise_LD = torch.empty(len(token_ids_L), dimension, device=device)
        bound = self.alpha / math.sqrt(noise_LD.numel())
        return noise_LD.uniform_(-bound, bound, generator=torch.Generator(device).manual_seed(seed))
