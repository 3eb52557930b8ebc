"""Responses that share a prompt, planned and packed so that the prompt is computed once.

The prompt of a sequence are its tokens before the first trained one, with their pictures. Only neighbours in a
micro-batch share a prompt, so that a pack's outputs have the order of its sequences; `plan_groups` makes sequences of
one prompt neighbours.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_cli.data.packing.packs import Bounds, Pack, TokenSequence, pack, plan_packs, room_of
from rlhf_cli.data.packing.prefix_packing import Branch, Tree, pack_trees

PromptKey = tuple[bytes | str, ...]
"""The bytes of a prompt's tokens, and the digests of its pictures."""


def plan_groups(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    num_ranks: int,
    quadratic_cost: float,
    max_sequences: int | None = None,
) -> list[list[list[int]]]:
    """Return a plan as `plan_packs` does, in which sequences of one prompt are neighbours and the prompt counts once.

    A group that is larger than a micro-batch, or than a rank's even share of all tokens, is cut into several. With
    `max_sequences`, micro-batches are filled one after the other, each with about as many sequences.
    """
    prompts = [_prompt_size(sequence) for sequence in sequences]
    lengths = np.array([len(sequence) for sequence in sequences])
    patches = np.array([sequence.patches for sequence in sequences])
    sizes = _Sizes(prompts, lengths.tolist(), room_of(np.zeros_like(lengths), patches, max_tokens=max_tokens).tolist())
    groups: dict[PromptKey, list[int]] = {}
    for index, (sequence, size) in enumerate(zip(sequences, sizes.prompts, strict=True)):
        groups.setdefault(_key(sequence, size), []).append(index)
    if max_sequences is None:
        total = sum(sizes.tokens(members) for members in groups.values())
        limit = min(max_tokens, -(-total // num_ranks))
        blocks = [[part] for members in groups.values() for part in sizes.cut(members, limit)]
    else:
        bounds = Bounds(max_tokens, max_sequences)
        blocks = sizes.filled(list(groups.values()), bounds, num_ranks=num_ranks)
    plan = plan_packs(
        [sum(map(sizes.room, parts)) for parts in blocks],
        costs=[sum(sizes.cost(part, quadratic_cost) for part in parts) for parts in blocks],
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        max_sequences=None if max_sequences is None else 1,  # a block is a micro-batch already
    )
    return [[[i for block in members for part in blocks[block] for i in part] for members in bins] for bins in plan]


def pack_groups(sequences: Sequence[TokenSequence]) -> Pack:
    """Return the sequences in their order as one pack, in which neighbours with equal prompts have the prompt once."""
    groups = [list(group) for _, group in itertools.groupby(sequences, key=lambda s: _key(s, _prompt_size(s)))]
    if len(groups) == len(sequences):
        return pack(list(sequences))
    return pack_trees([_tree_of(group) for group in groups], share_prompts=True)


def _prompt_size(sequence: TokenSequence) -> int:
    """Return the number of tokens before the first trained one; without a trained one, of all but the last token."""
    return int(sequence.loss_mask.argmax()) or max(1, len(sequence) - 1)  # the first token is never trained


def _key(sequence: TokenSequence, size: int) -> PromptKey:
    """Return what prompts of that many tokens are compared by: tokens, and pictures, whose tokens are all alike."""
    digests = (placed.picture.digest for placed in sequence.pictures if placed.start < size)
    return sequence.token_ids[:size].tobytes(), *digests


def _tree_of(group: list[TokenSequence]) -> Tree:
    size = _prompt_size(group[0])
    pictures = tuple(placed for placed in group[0].pictures if placed.start < size)
    return Tree(group[0].token_ids[:size], tuple(_branch_of(sequence, size) for sequence in group), pictures)


def _branch_of(sequence: TokenSequence, size: int) -> Branch:
    later = tuple(placed.moved(-size) for placed in sequence.pictures if placed.start >= size)
    return Branch(sequence.token_ids[size:], sequence.loss_mask[size:], later)


@dataclass(frozen=True)
class _Sizes:
    """Tokens of sequences and of their prompts, and the room of their pictures, which stand in the prompts.

    `members` are indices of sequences of one prompt.
    """

    prompts: list[int]
    lengths: list[int]
    pictures: list[int]

    def tokens(self, members: list[int]) -> int:
        """Return the number of tokens in a pack."""
        prompt = self.prompts[members[0]]
        return prompt + sum(self.lengths[i] - prompt for i in members)

    def room(self, members: list[int]) -> int:
        """Return the room that members take in a pack: tokens, or the room of the prompt's pictures if that is more."""
        return max(self.tokens(members), self.pictures[members[0]])

    def cost(self, members: list[int], quadratic_cost: float) -> float:
        """Linear in tokens; attention by the square of each sequence, the square of the prompt counted once."""
        prompt = self.prompts[members[0]]
        squares = prompt**2 + sum(self.lengths[i] ** 2 - prompt**2 for i in members)
        return self.tokens(members) + quadratic_cost * squares

    def cut(self, members: list[int], limit: int) -> list[list[int]]:
        """Return the neighbours of a group in pieces, each as large as the limit of tokens allows, with at least one
        sequence.
        """
        prompt = self.prompts[members[0]]
        parts: list[list[int]] = []
        room = 0
        for index in members:
            branch = self.lengths[index] - prompt
            if not parts or branch > room:
                parts.append([])
                room = limit - prompt
            parts[-1].append(index)
            room -= branch
        return parts

    def filled(self, groups: list[list[int]], bounds: Bounds, *, num_ranks: int) -> list[list[list[int]]]:
        """Return blocks of the groups' sequences in their order, evenly many in each; a block is parts of groups.

        There are the fewest blocks that hold all sequences, in a multiple of the ranks. A block that reaches the limit
        of tokens ends before, which may make more of them.
        """
        left, places, room = len(self.lengths), 0, 0
        num_blocks = -(-left // (bounds.sequences * num_ranks)) * num_ranks
        blocks: list[list[list[int]]] = []
        for members in groups:
            is_open = False  # whether the last part of the last block is of this group
            for index in members:
                part = blocks[-1][-1] if is_open else []
                needed = self.room([*part, index]) - (self.room(part) if part else 0)
                if not places or needed > room:
                    even = -(-left // max(1, num_blocks - len(blocks)))
                    places, room = min(even, bounds.sequences), bounds.tokens
                    needed, is_open = self.room([index]), False
                    blocks.append([])
                if not is_open:
                    blocks[-1].append([])
                    is_open = True
                blocks[-1][-1].append(index)
                left, places, room = left - 1, places - 1, room - needed
        return blocks
