"""Packs of sequences that begin alike: a prompt and several continuations of it.

The prompt is repeated before each continuation, or stands in the pack once and all continuations attend to it. The
outputs at the continuations are the same.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.data.packing.packs import KeyBounds, Pack, pack


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation of a prompt: `token_ids` int32 [R], and `loss_mask` bool [R], true for tokens that are training
    targets.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return self.token_ids.size


@dataclass(frozen=True, slots=True)
class Tree:
    """A prompt, int32 [P] of at least one token, and its continuations of at least one token each."""

    prompt_ids: np.ndarray
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class _TokenRun:
    """Tokens that stand together in the pack; `behind` is the run that they continue, if that is another one."""

    token_ids: np.ndarray
    first_position: int
    behind: int | None = None


def pack_trees(trees: Sequence[Tree], *, share_prompts: bool, read_ends: bool = False) -> Pack:
    """Return all branches of the trees as one pack, in which a branch counts as a sequence.

    With `share_prompts` a prompt is in the pack once. The pack reads the hidden states that predict the branches'
    targets, or with `read_ends` the hidden state at the last token of each branch. No trees give the idle pack.
    """
    if not trees:
        return pack([])
    runs: list[_TokenRun] = []
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    start = 0
    for tree in trees:
        num_prompt = tree.prompt_ids.size
        own_prompt, prompt_end, prompt_run = 0, start + num_prompt - 1, len(runs)
        if share_prompts:
            runs.append(_TokenRun(tree.prompt_ids, 0))
            start += num_prompt
        for branch in tree.branches:
            if share_prompts:
                runs.append(_TokenRun(branch.token_ids, num_prompt, behind=prompt_run))
            else:
                runs.append(_TokenRun(np.concatenate([tree.prompt_ids, branch.token_ids]), 0))
                own_prompt, prompt_end = num_prompt, start + num_prompt - 1
            read = np.array([len(branch) - 1]) if read_ends else np.flatnonzero(branch.loss_mask)
            before = read if read_ends else read - 1
            rows.append(np.where(before < 0, prompt_end, start + own_prompt + before))
            targets.append(branch.token_ids[read])
            start += own_prompt + len(branch)
    return _pack(runs, rows, targets, shared=share_prompts)


def _pack(runs: list[_TokenRun], rows: list[np.ndarray], targets: list[np.ndarray], *, shared: bool) -> Pack:
    lengths = np.array([run.token_ids.size for run in runs])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    positions = [np.arange(run.first_position, run.first_position + run.token_ids.size) for run in runs]
    return Pack(
        input_ids_T=_int64([run.token_ids for run in runs]),
        position_ids_T=_int64(positions),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        rows_K=_int64(rows),
        read_R=torch.from_numpy(np.unique(np.concatenate(rows)).astype(np.int64)),
        targets_K=_int64(targets),
        cu_trained=torch.from_numpy(np.cumsum([0] + [part.size for part in rows])),
        keys=_key_bounds(runs, bounds) if shared else None,
    )


def _key_bounds(runs: list[_TokenRun], bounds: np.ndarray) -> KeyBounds:
    own = [np.arange(first, stop) for first, stop in itertools.pairwise(bounds)]
    seen = [
        part if run.behind is None else np.concatenate([own[run.behind], part])
        for run, part in zip(runs, own, strict=True)
    ]
    lengths = [part.size for part in seen]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return KeyBounds(_int64(seen), torch.from_numpy(cu_seqlens), max(lengths))


def _int64(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
