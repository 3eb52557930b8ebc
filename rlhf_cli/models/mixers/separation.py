"""Check of custom model code: a layer without a cache argument may mix sequences unseen (`layers`)."""

import torch
from transformers import PreTrainedModel

from rlhf_cli.errors import UsageError
from rlhf_cli.models.sequence_parallel.parts import Runs

ROUNDING = {torch.float32: 1e-4}
"""Largest change, relative to the states, that counts as rounding; 1e-2 for 16-bit types."""
# The same tokens in another order, so that a mixture of experts gets the same number of tokens per expert at first.
BEFORE = (3, 4, 5, 6), (6, 5, 4, 3)
SEQUENCE = (7, 8, 9, 10)


@torch.no_grad()
def require_separate_sequences(model: PreTrainedModel) -> None:
    """Raise UsageError if a sequence of a pack changes the hidden states of the next one."""
    found = [_states(model, before) for before in BEFORE]
    largest = ROUNDING.get(model.dtype, 1e-2) * found[0].abs().max()
    if (found[0] - found[1]).abs().max() > largest:
        raise UsageError(f"{type(model).__name__} cannot be trained on packs: a sequence changes the next one")


def _states(model: PreTrainedModel, before: tuple[int, ...]) -> torch.Tensor:
    bounds = torch.tensor([0, len(before), len(before) + len(SEQUENCE)], dtype=torch.int32, device=model.device)
    runs = Runs(bounds, bounds, len(SEQUENCE), len(SEQUENCE))
    positions = [*range(len(before)), *range(len(SEQUENCE))]
    output = model.get_decoder()(
        input_ids=torch.tensor([[*before, *SEQUENCE]], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        use_cache=False,
        **runs.as_arguments(),
    )
    states: torch.Tensor = output.last_hidden_state[0, len(before) :].float()
    return states
