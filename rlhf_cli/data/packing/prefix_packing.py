"""Packs of sequences with shared prefixes: a prompt with several continuations.

The prompt is repeated before each continuation, or included once with all continuations attending to it. Outputs at the
continuations are equal.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.data.packing.packs import KeyBounds, Pack, pack
from rlhf_cli.data.packing.placing_pictures import TokenRun, place_pictures, rope_shift
from rlhf_cli.data.packing.routed_experts import joined_experts
from rlhf_cli.models.vision.pictures import PlacedPicture


@dataclass(frozen=True, slots=True)
class Continuation:
    """A response to a prompt: `token_ids` int32 [R], and `loss_mask` bool [R], True for training targets. Positions of
    `pictures` are relative to its first token, and `routed_experts` (`TokenSequence`) start with it.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    pictures: tuple[PlacedPicture, ...] = ()
    routed_experts: np.ndarray | None = None

    def __len__(self) -> int:
        return self.token_ids.size


@dataclass(frozen=True, slots=True)
class Tree:
    """A prompt, int32 [P] with at least one token, with continuations of at least one token each.

    Experts of the prompt are replayed only if it is shared.
    """

    prompt_ids: np.ndarray
    continuations: tuple[Continuation, ...]
    pictures: tuple[PlacedPicture, ...] = ()
    routed_experts: np.ndarray | None = None

    def run(self) -> TokenRun:
        """Return the prompt as a run."""
        return TokenRun(self.prompt_ids, pictures=self.pictures, routed_experts=self.routed_experts)

    def run_with(self, continuation: Continuation) -> TokenRun:
        """Return the prompt with one continuation as a run."""
        later = tuple(placed.moved(self.prompt_ids.size) for placed in continuation.pictures)
        return TokenRun(np.concatenate([self.prompt_ids, continuation.token_ids]), pictures=self.pictures + later)

    def run_behind(self, continuation: Continuation, prompt_run: int) -> TokenRun:
        """Return a continuation as a run, in a pack with the prompt as run number `prompt_run`."""
        # The prompt's images shift the positions of all continuations.
        shift = rope_shift(self.pictures)
        return TokenRun(
            continuation.token_ids,
            self.prompt_ids.size,
            prompt_run,
            continuation.pictures,
            shift,
            continuation.routed_experts,
        )


def pack_trees(trees: Sequence[Tree], *, share_prompts: bool, read_ends: bool = False) -> Pack:
    """Pack all continuations of the trees. Each continuation counts as a sequence.

    With `share_prompts`, each prompt is included once. The pack reads hidden states that predict the targets, or with
    `read_ends` the hidden state at each continuation's last token. Without trees, returns the idle pack.
    """
    if not trees:
        return pack([])
    runs: list[TokenRun] = []
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    start = 0
    for tree in trees:
        num_prompt = tree.prompt_ids.size
        own_prompt, prompt_end, prompt_run = 0, start + num_prompt - 1, len(runs)
        if share_prompts:
            runs.append(tree.run())
            start += num_prompt
        for continuation in tree.continuations:
            if share_prompts:
                runs.append(tree.run_behind(continuation, prompt_run))
            else:
                runs.append(tree.run_with(continuation))
                own_prompt, prompt_end = num_prompt, start + num_prompt - 1
            # A reward model reads the state at the end instead of the states before targets.
            read = np.array([len(continuation) - 1]) if read_ends else np.flatnonzero(continuation.loss_mask)
            before = read if read_ends else read - 1
            # A branch's first token is predicted by the prompt's last one, which is in another run.
            rows.append(np.where(before < 0, prompt_end, start + own_prompt + before))
            targets.append(continuation.token_ids[read])
            start += own_prompt + len(continuation)
    return _pack(runs, rows, targets, shared=share_prompts)


def _pack(runs: list[TokenRun], rows: list[np.ndarray], targets: list[np.ndarray], *, shared: bool) -> Pack:
    lengths = np.array([run.token_ids.size for run in runs])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    positions = [np.arange(run.first_position, run.first_position + run.token_ids.size) for run in runs]
    return Pack(
        input_ids_T=_int64([run.token_ids for run in runs]),
        position_ids_T=_int64(positions),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        rows_K=_int64(rows),
        # Several branches read the prompt's last state, which is computed once.
        read_R=torch.from_numpy(np.unique(np.concatenate(rows)).astype(np.int64)),
        targets_K=_int64(targets),
        cu_trained=torch.from_numpy(np.cumsum([0] + [part.size for part in rows])),
        keys=_key_bounds(runs, bounds) if shared else None,
        pictures=place_pictures(runs),
        routed_experts=joined_experts([(run.token_ids.size, run.routed_experts) for run in runs]),
    )


def _key_bounds(runs: list[TokenRun], bounds: np.ndarray) -> KeyBounds:
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
