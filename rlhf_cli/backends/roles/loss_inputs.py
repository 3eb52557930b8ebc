"""What the loss of a policy reads for a micro-batch: outputs and columns of sampled tokens, apart from observations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_cli.algorithms.aggregation import CORRECT, OBSERVED, PROMPT_TOKENS
from rlhf_cli.algorithms.policy_loss import PolicyColumns
from rlhf_cli.backends.roles.selected_tokens import COVARIANT, KEPT
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.data.packing.packs import MicroBatch

_SAMPLED, _OBSERVATIONS, _BOUNDS = "sampled_places", "observed_places", "sampled_bounds"
"""Places of sampled and observation tokens in the targets of a micro-batch, and bounds of sequences in the former."""


def optional_columns(policy: PolicyConfig) -> tuple[str, ...]:
    """Return the names of columns that only some settings read."""
    asked = {
        PROMPT_TOKENS: policy.loss_agg == "prompt_mean",
        CORRECT: policy.correct_nll_coef > 0,
        OBSERVED: policy.observation_nll_coef > 0,
    }
    return tuple(name for name, is_read in asked.items() if is_read)


def with_places(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch in host memory with the places of its observations; unchanged if they are no targets."""
    # Selecting by places instead of a mask: the host does not wait for a GPU to count tokens.
    observed_T = batch.columns.get(OBSERVED)
    if observed_T is None:
        return batch
    is_sampled_T = observed_T == 0
    places = {
        _SAMPLED: is_sampled_T.nonzero().squeeze(1),
        _OBSERVATIONS: observed_T.nonzero().squeeze(1),
        _BOUNDS: pad(is_sampled_T.cumsum(0), (1, 0))[batch.pack.cu_trained],
    }
    return replace(batch, columns=batch.columns | places)


@dataclass(frozen=True)
class LossInputs:
    """Outputs of the policy for the K sampled and O observation tokens of a micro-batch.

    - `logprobs_K`, `entropy_K`: of sampled tokens, with gradient; `columns` by name, `[K]`.
    - `cu`: bounds of sequences in sampled tokens, int64 `[B+1]`.
    - `observed_O`: log-probs of observations, with gradient; None if they are no targets.

    Example: targets [a, b, x, c] with an observation x give K = 3, O = 1 and `cu` [0, 3].
    """

    logprobs_K: Tensor
    entropy_K: Tensor
    columns: dict[str, Tensor]
    cu: Tensor
    observed_O: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, batch: MicroBatch, *, temperature: float) -> Self:
        """Run the model on a micro-batch with T targets and the places of its observations, and split its outputs."""
        logprobs_T, entropy_T = model(batch.pack, temperature=temperature, with_entropy=True)
        if OBSERVED not in batch.columns:
            return cls(logprobs_T, entropy_T, batch.columns, batch.pack.cu_trained)
        columns = dict(batch.columns)
        sampled_K, observations_O, cu = (columns.pop(name) for name in (_SAMPLED, _OBSERVATIONS, _BOUNDS))
        return cls(
            logprobs_T[sampled_K],
            entropy_T[sampled_K],
            {name: values_T[sampled_K] for name, values_T in columns.items()},
            cu,
            logprobs_T[observations_O],
        )

    def policy_columns(self, roles: Iterable[str]) -> PolicyColumns:
        """Return the columns of the policy loss, with KL terms of these roles."""
        columns = self.columns
        return PolicyColumns(
            rollout_K=columns["rollout_logprobs"],
            advantages_K=columns["advantages"],
            cu=self.cu,
            old_K=columns.get("old_logprobs"),
            frozen_K={role: columns[f"{role}_logprobs"] for role in roles},
            kept_K=columns.get(KEPT),
            covariant_K=columns.get(COVARIANT),
            prompt_tokens_K=columns.get(PROMPT_TOKENS),
            correct_K=columns.get(CORRECT),
        )
