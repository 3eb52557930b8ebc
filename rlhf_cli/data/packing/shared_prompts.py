"""Responses with shared prompts, planned and packed so that each prompt is computed once.

A sequence's prompt is its tokens before the first trained one, with images. Only adjacent sequences share a prompt, so
that a pack's outputs are in sequence order; `plan_groups` makes sequences of a prompt adjacent.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_cli.data.packing.packs import Bounds, Pack, TokenSequence, pack, plan_packs, room_of
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees

_PromptKey = tuple[bytes | str, ...]
"""Bytes of a prompt's tokens, and its image digests."""


def plan_groups(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    num_ranks: int,
    quadratic_cost: float,
    max_sequences: int | None = None,
) -> list[list[list[int]]]:
    """Return a plan like `plan_packs`, with sequences of a prompt adjacent and the prompt counted once.

    A group larger than a micro-batch, or than a rank's even share of all tokens, is split. With `max_sequences`,
    micro-batches are filled one by one with about equally many sequences.
    """
    prompts = [_prompt_size(sequence) for sequence in sequences]
    lengths = np.array([len(sequence) for sequence in sequences])
    patches = np.array([sequence.patches for sequence in sequences])
    # Images count through their room, as in `plan_packs`.
    sizes = _Sizes(prompts, lengths.tolist(), room_of(np.zeros_like(lengths), patches, max_tokens=max_tokens).tolist())
    groups: dict[_PromptKey, list[int]] = {}
    for index, (sequence, size) in enumerate(zip(sequences, sizes.prompts, strict=True)):
        groups.setdefault(_key(sequence, size), []).append(index)
    if max_sequences is None:
        total = sum(sizes.tokens(members) for members in groups.values())
        # An even share per rank, because a larger group would leave other ranks idle.
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
        max_sequences=None if max_sequences is None else 1,  # a block is already a micro-batch
    )
    return [[[i for block in members for part in blocks[block] for i in part] for members in bins] for bins in plan]


def pack_groups(sequences: Sequence[TokenSequence]) -> Pack:
    """Pack the sequences in order. Adjacent sequences with equal prompts share the prompt."""
    groups = [list(group) for _, group in itertools.groupby(sequences, key=lambda s: _key(s, _prompt_size(s)))]
    # Without repeated prompts the simple pack is cheaper.
    if len(groups) == len(sequences):
        return pack(list(sequences))
    return pack_trees([_tree_of(group) for group in groups], share_prompts=True)


def _prompt_size(sequence: TokenSequence) -> int:
    """Return the number of tokens before the first trained one; without trained tokens, all except the last."""
    return int(sequence.loss_mask.argmax()) or max(1, len(sequence) - 1)  # the first token is never trained


def _key(sequence: TokenSequence, size: int) -> _PromptKey:
    """Return the comparison key of a prompt with `size` tokens: tokens, and images, which have identical placeholder
    tokens.
    """
    digests = (placed.picture.digest for placed in sequence.pictures if placed.start < size)
    # Compare digests too: all images of a size have equal tokens.
    return sequence.token_ids[:size].tobytes(), *digests


def _tree_of(group: list[TokenSequence]) -> Tree:
    size = _prompt_size(group[0])
    first = group[0]
    pictures = tuple(placed for placed in first.pictures if placed.start < size)
    # The engine may have computed the prompt several times: replay the experts of one response for all.
    experts = None if first.routed_experts is None else first.routed_experts[:size]
    continuations = tuple(_continuation_of(sequence, size) for sequence in group)
    return Tree(first.token_ids[:size], continuations, pictures, experts)


def _continuation_of(sequence: TokenSequence, size: int) -> Continuation:
    later = tuple(placed.moved(-size) for placed in sequence.pictures if placed.start >= size)
    experts = None if sequence.routed_experts is None else sequence.routed_experts[size:]
    return Continuation(sequence.token_ids[size:], sequence.loss_mask[size:], later, experts)


@dataclass(frozen=True)
class _Sizes:
    """Token counts of sequences and prompts, and room of the prompts' images.

    `members` are indices of sequences with the same prompt.
    """

    prompts: list[int]
    lengths: list[int]
    pictures: list[int]

    def tokens(self, members: list[int]) -> int:
        """Return the number of tokens in a pack."""
        prompt = self.prompts[members[0]]
        return prompt + sum(self.lengths[i] - prompt for i in members)

    def room(self, members: list[int]) -> int:
        """Return the room in a pack: tokens, or the room of the prompt's images if larger."""
        return max(self.tokens(members), self.pictures[members[0]])

    def cost(self, members: list[int], quadratic_cost: float) -> float:
        """Return the cost: linear in tokens, plus attention quadratic in sequence length, with the prompt counted
        once.
        """
        prompt = self.prompts[members[0]]
        # Attention of a branch covers the prompt, whose own square is counted once.
        squares = prompt**2 + sum(self.lengths[i] ** 2 - prompt**2 for i in members)
        return self.tokens(members) + quadratic_cost * squares

    def cut(self, members: list[int], limit: int) -> list[list[int]]:
        """Split a group of adjacent sequences into parts of at most `limit` tokens, with at least one sequence each."""
        prompt = self.prompts[members[0]]
        parts: list[list[int]] = []
        room = 0
        for index in members:
            continuation = self.lengths[index] - prompt
            # Start a new part with a repeated prompt when the limit is reached.
            if not parts or continuation > room:
                parts.append([])
                room = limit - prompt
            parts[-1].append(index)
            room -= continuation
        return parts

    def filled(self, groups: list[list[int]], bounds: Bounds, *, num_ranks: int) -> list[list[list[int]]]:
        """Return blocks of the groups' sequences in order, with about equally many sequences each; a block is a list of
        group parts.

        The number of blocks is the smallest multiple of `num_ranks` that fits all sequences. A block that reaches the
        token limit ends early, which may add blocks.
        """
        left, places, room = len(self.lengths), 0, 0
        num_blocks = -(-left // (bounds.sequences * num_ranks)) * num_ranks
        blocks: list[list[list[int]]] = []
        for members in groups:
            is_open = False  # the last part of the last block belongs to this group
            for index in members:
                part = blocks[-1][-1] if is_open else []
                # Further sequences of an open part need no room for the prompt.
                needed = self.room([*part, index]) - (self.room(part) if part else 0)
                if not places or needed > room:
                    # Divide the remaining sequences evenly over the remaining blocks.
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
