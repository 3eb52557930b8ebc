"""What one rank records about an update: columns of tokens, and gradients."""

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from rlhf_cli.algorithms.gradient_share import Projection
from rlhf_cli.algorithms.token_trace import SAMPLE, TokenTrace
from rlhf_cli.backends.roles.watch import Place, Watch
from rlhf_cli.backends.training.step_gradients import full_gradients, projection
from rlhf_cli.data.packing.packs import TokenSequence

Terms = Callable[[TokenSequence, Mapping[str, Tensor]], Tensor]
"""(sequence, its columns in the trace) -> parts of the step's loss by trained token, `[K]`, with gradient."""


class UpdateRecord:
    """What one rank recorded about an update.

    - `trace`: columns of its tokens.
    - `projections`: gradients of its watched tokens, one mapping per optimizer step.
    - `gradient`: gradient of the first optimizer step by parameter, float32 in host memory; {} unless requested.
    """

    def __init__(self, watch: Watch) -> None:
        self.trace = TokenTrace()
        self.projections: list[dict[Place, Projection]] = []
        self.gradient: dict[str, Tensor] = {}
        self._watch = watch

    def begin_step(self, module: nn.Module, step: list[list[TokenSequence]], terms: Terms) -> Callable[[], None]:
        """Begin an optimizer step on these micro-batches. Returns the function to call between backward passes and
        optimizer step, on all ranks.
        """
        self.trace.begin_step()
        self.projections.append({})
        sequences = [sequence for sequences in step for sequence in sequences]

        def accumulated() -> None:
            is_first = self._watch.keeps_gradient and len(self.projections) == 1
            if not (is_first or self._watch.tokens):
                return
            gradients = full_gradients(module)
            if is_first and dist.get_rank() == 0:
                self.gradient = gradients
            for sequence in sequences:
                self._compare(sequence, gradients, module, terms)

        return accumulated

    def _compare(
        self, sequence: TokenSequence, gradients: Mapping[str, Tensor], module: nn.Module, terms: Terms
    ) -> None:
        """Compare the gradients of the watched tokens of a sequence with the gradient of the step."""
        # Filler of ranks without work has no trained tokens.
        number = int(sequence.columns[SAMPLE][0]) if sequence.num_trained else None
        tokens = [token for watched, token in self._watch.tokens if watched == number]
        if number is None or not tokens:
            return
        terms_K = terms(sequence, self.trace.of_sequence(number))
        for token in tokens:
            self.projections[-1][number, token] = projection(terms_K[token], module, gradients)
