"""Losses on pairs of a chosen and a rejected response, DPO and its relatives: one row of a table each.

A loss is one value a pair; the loss of an optimizer step is its sum over all pairs of the step divided by their
number. What couples the pairs of a step (the sort of `aot`, the baseline of `bco_pair`) is a constant in
`PairLogprobs`, made from all pairs of the step by a pass without gradients (`aot_partners`, `implicit_rewards`), so
that cutting the step into micro-batches changes neither loss nor gradient.

In the formulas `h_c = chosen - ref_chosen` and `h_r = rejected - ref_rejected` are log-ratios summed over tokens,
`d = h_c - h_r`, `|c|` and `|r|` the numbers of trained tokens, `s` the logistic function. Left out on purpose: the
NLL of the chosen responses as an extra term, which is a mean over tokens and the caller's; only `orpo` has its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.reward_model import reward_metrics
from rlhf_cli.config.plugins import is_target, load_target
from rlhf_cli.config.preference import PAIR_LOSSES, StepConstant
from rlhf_cli.errors import RunError

# Stands for a label smoothing of 0 in exo_pair, whose target must not be one-hot; EXO's author gave TRL this value.
EXO_LABEL_SMOOTHING = 1e-3

# Odds are taken of a probability of at most exp(-1e-6): beyond it float32 holds no odds worth a gradient.
MAX_ODDS_LOGPROB = -1e-6


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probs of B pairs, float `[B]`, summed over the trained tokens of each response.

    Under the model, with gradient; under the reference, without, None if no loss needs one. `chosen_lengths` and
    `rejected_lengths` are numbers of trained tokens. `aot_partner` and `bco_delta` (one number, or the same for every
    pair) are constants of the step, None if no loss needs them.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    ref_chosen_logprobs: Tensor | None
    ref_rejected_logprobs: Tensor | None
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    aot_partner: Tensor | None = None
    bco_delta: Tensor | float | None = None


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """The tunable numbers of the losses; a row of the table names the ones it reads.

    `label_smoothing`: share of pairs whose labels are taken to be swapped, below 0.5. `simpo_gamma`: reward by which
    the chosen response should lead. `discopop_tau`: temperature of the blend, at most 1, beyond which the loss grows
    exponentially. `orpo_lambda`: weight of the odds ratio beside the NLL.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    discopop_tau: float = 0.05
    orpo_lambda: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ValueError(f"beta must be above 0, not {self.beta}")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be at least 0 and below 0.5, not {self.label_smoothing}")
        if not 0.0 < self.discopop_tau <= 1.0:
            raise ValueError(f"discopop_tau must be above 0 and at most 1, not {self.discopop_tau}")


PreferenceFunction = Callable[[PairLogprobs, PreferenceSettings], Tensor]


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """One loss on pairs.

    `settings`: the fields of `PreferenceSettings` it reads, all others change nothing; `needs_reference`: whether the
    reference's log-probs must be there; `step_constant`: the field of `PairLogprobs` that must be there besides.
    """

    name: str
    function: PreferenceFunction
    settings: frozenset[str]
    needs_reference: bool = True
    step_constant: StepConstant | None = None


def log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """Return (h_c, h_r), both `[B]`: log-probs of the responses less those under the reference."""
    assert pairs.ref_chosen_logprobs is not None, "this needs a reference"
    assert pairs.ref_rejected_logprobs is not None, "this needs a reference"
    return pairs.chosen_logprobs - pairs.ref_chosen_logprobs, pairs.rejected_logprobs - pairs.ref_rejected_logprobs


def sigmoid_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-(1 - e) log s(beta d) - e log s(-beta d)`, e the label smoothing.

    DPO where e is 0 (arXiv 2305.18290, eq. 7), else cDPO (ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    return _smoothed(settings.beta * _difference(pairs), settings.label_smoothing)


def ipo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `(h_c / |c| - h_r / |r| - 1 / (2 beta))^2`, arXiv 2310.12036, eq. 17, beta its tau.

    The paper writes sums; lengths are averaged out here as in TRL, whose source reports that the authors meant it so.
    """
    chosen_B, rejected_B = _averaged(pairs, *log_ratios(pairs))
    return (chosen_B - rejected_B - 0.5 / settings.beta).square()


def hinge_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `max(0, 1 - beta d)`: the hinge of SLiC-HF (arXiv 2305.10425) on log-ratios, as in RSO (2309.06657)."""
    return torch.relu(1.0 - settings.beta * _difference(pairs))


def robust_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `(-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e)`, e the label smoothing: rDPO, arXiv 2403.00409.

    Its mean over pairs of which a share e is swapped is the DPO loss of the true labels. It may be negative.
    """
    scaled_B, e = settings.beta * _difference(pairs), settings.label_smoothing
    return (e * logsigmoid(-scaled_B) - (1.0 - e) * logsigmoid(scaled_B)) / (1.0 - 2.0 * e)


def sppo_hard_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `(h_c - 1 / (2 beta))^2 + (h_r + 1 / (2 beta))^2`: SPPO, arXiv 2405.00675, eq. 4.7, with eta = 1 / beta.

    Hard: the chosen response wins with probability 1, while the paper asks a preference model.
    """
    chosen_B, rejected_B = log_ratios(pairs)
    target = 0.5 / settings.beta
    return (chosen_B - target).square() + (rejected_B + target).square()


def nca_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-log s(beta h_c) - log s(-beta h_c) / 2 - log s(-beta h_r) / 2`: NCA for pairs, arXiv 2402.05369."""
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return -logsigmoid(chosen_B) - 0.5 * logsigmoid(-chosen_B) - 0.5 * logsigmoid(-rejected_B)


def exo_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `q log(q / (1 - e)) + (1 - q) log((1 - q) / e)`, `q = s(beta d)`: EXO-pref for two, arXiv 2402.00856, eq.
    16.

    The KL divergence of the model's choice from labels smoothed by e. It is infinite without smoothing, so that 0
    stands for 1e-3.
    """
    scaled_B, e = settings.beta * _difference(pairs), settings.label_smoothing or EXO_LABEL_SMOOTHING
    right_B = torch.sigmoid(scaled_B) * (logsigmoid(scaled_B) - math.log1p(-e))
    return right_B + torch.sigmoid(-scaled_B) * (logsigmoid(-scaled_B) - math.log(e))


def apo_zero_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `1 - s(beta h_c) + s(beta h_r)`: APO-zero, arXiv 2408.06266, eq. 7.

    For chosen responses that are better than the model's own: raises the chosen one, lowers the rejected one.
    """
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return torch.sigmoid(-chosen_B) + torch.sigmoid(rejected_B)


def apo_down_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `s(beta h_c) + 1 - s(beta d)`: APO-down, arXiv 2408.06266, eq. 8.

    For chosen responses that are worse than the model's own: lowers both, the rejected one more.
    """
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return torch.sigmoid(chosen_B) + torch.sigmoid(rejected_B - chosen_B)


def bco_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-log s(beta h_c - delta) - log s(-(beta h_r - delta))`: BCO on pairs, arXiv 2404.04656.

    `delta`, `pairs.bco_delta`, is the mean of the implicit rewards of chosen and rejected responses over all pairs of
    the step; the paper and TRL keep a running mean, which would be a state of its own. No gradient flows through it.
    """
    assert pairs.bco_delta is not None, "bco_pair needs the step's delta"
    delta = pairs.bco_delta.detach() if isinstance(pairs.bco_delta, Tensor) else pairs.bco_delta
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return -logsigmoid(chosen_B - delta) - logsigmoid(delta - rejected_B)


def aot_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-(1 - e) log s(beta (u - v')) - e log s(-beta (u - v'))`: AOT on pairs, arXiv 2406.05882.

    `u = chosen - rejected` under the model. The paper sorts u and `v = ref_chosen - ref_rejected` over the pairs and
    compares equal ranks, so that the distribution of u dominates that of v; `v'`, `pairs.aot_partner`, is v
    at u's rank among all pairs of the step. v carries no gradient and ranks have none: this form has exactly the value
    and the gradient of the sorted one, pair by pair.
    """
    assert pairs.aot_partner is not None, "aot needs the partners from the whole step"
    margin_B = pairs.chosen_logprobs - pairs.rejected_logprobs - pairs.aot_partner
    return _smoothed(settings.beta * margin_B, settings.label_smoothing)


def discopop_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-(1 - m) log s(x) + m exp(-x)`, `x = beta d`, `m = s(x / tau)`: DiscoPOP, arXiv 2406.08414, eq. 5."""
    scaled_B, tau = settings.beta * _difference(pairs), settings.discopop_tau
    logistic_B = -torch.sigmoid(-scaled_B / tau) * logsigmoid(scaled_B)
    # m exp(-x) in one exponential: where x is very negative, m is 0 and exp(-x) infinite.
    return logistic_B + torch.exp(logsigmoid(scaled_B / tau) - scaled_B)


def sigmoid_norm_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-log s(beta (h_c / |c| - h_r / |r|))`, smoothed as `sigmoid`: length-normalised DPO, arXiv 2411.15124.

    Log-ratios per token are small: Tulu 3 uses beta 5.
    """
    chosen_B, rejected_B = _averaged(pairs, *log_ratios(pairs))
    return _smoothed(settings.beta * (chosen_B - rejected_B), settings.label_smoothing)


def simpo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-log s(beta (chosen / |c| - rejected / |r|) - gamma)`: SimPO, without a reference, arXiv 2405.14734, eq.
    6.

    Log-probs per token are small: the paper uses betas of 2 to 10, with gamma 0.1 to 0.8 of beta. TRL takes gamma /
    beta off within beta's bracket, which is the same.
    """
    chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    return -logsigmoid(settings.beta * (chosen_B - rejected_B) - settings.simpo_gamma)


def orpo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Return `-a_c - lambda log s(log odds(a_c) - log odds(a_r))`: ORPO, without a reference, arXiv 2403.07691, eq. 6
    and 7.

    `a_c = chosen / |c|`, `a_r = rejected / |r|` and `odds(a) = exp(a) / (1 - exp(a))`. The NLL is averaged over each
    response, then over pairs, as the odds are; TRL averages it over all tokens of the batch.
    """
    chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    log_odds_ratio_B = chosen_B - rejected_B - (_log_complement(chosen_B) - _log_complement(rejected_B))
    return -chosen_B - settings.orpo_lambda * logsigmoid(log_odds_ratio_B)


@cache
def preference_loss(name: str) -> PreferenceLoss:
    """Return the loss of a name of the table, or of others' code. Raise ValueError for another name.

    A function of others reads all settings and gets the reference's log-probs; a `PreferenceLoss` states its needs.
    """
    row = PAIR_LOSSES.get(name)
    if row is not None:
        return PreferenceLoss(name, load_target(row.function), row.settings, row.needs_reference, row.step_constant)
    if not is_target(name):
        raise ValueError(f"the preference loss must be one of {', '.join(PAIR_LOSSES)}, not {name!r}")
    found = load_target(name)
    if isinstance(found, PreferenceLoss):
        return replace(found, name=name, function=_checked(name, found.function))
    return PreferenceLoss(name, _checked(name, found), frozenset(field.name for field in fields(PreferenceSettings)))


def preference_losses(names: Sequence[str]) -> list[PreferenceLoss]:
    """Return the losses of these names, in order. Raise ValueError for an unknown name."""
    return [preference_loss(name) for name in names]


def _checked(name: str, function: PreferenceFunction) -> PreferenceFunction:
    """Return a function of others that raises RunError for a result that is not one value for each pair."""

    def loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
        found_B = function(pairs, settings)
        if not isinstance(found_B, Tensor) or found_B.shape != pairs.chosen_logprobs.shape:
            raise RunError(f"--loss {name} has to return a tensor with one loss for each of the pairs")
        return found_B

    return loss


def mixed_loss(
    names: Sequence[str], weights: Sequence[float], pairs: PairLogprobs, settings: PreferenceSettings
) -> Tensor:
    """Return `sum of weight * loss` per pair `[B]`, as in MPO (arXiv 2411.10442). The weights need not add up to 1."""
    if len(names) != len(weights) or not names:
        raise ValueError(f"every preference loss needs one weight: there are {len(names)} and {len(weights)}")
    rows = preference_losses(names)
    weighted = [weight * row.function(pairs, settings) for row, weight in zip(rows, weights, strict=True)]
    return torch.stack(weighted).sum(dim=0)


def aot_partners(pairs: PairLogprobs) -> Tensor:
    """Return `[B]`, for each pair the `ref_chosen - ref_rejected` that it is compared with in `aot`, without
    gradient.
    """
    assert pairs.ref_chosen_logprobs is not None, "aot needs a reference"
    assert pairs.ref_rejected_logprobs is not None, "aot needs a reference"
    order_B = (pairs.chosen_logprobs - pairs.rejected_logprobs).detach().argsort(stable=True)
    sorted_B = (pairs.ref_chosen_logprobs - pairs.ref_rejected_logprobs).detach().sort().values
    partners_B = torch.empty_like(sorted_B)
    partners_B[order_B] = sorted_B
    return partners_B


def implicit_rewards(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return (chosen_B, rejected_B) without gradient: `beta (logprobs - ref)`, summed over tokens (arXiv 2305.18290,
    eq. 5).

    Without a reference `beta logprobs / length`, the reward of SimPO (arXiv 2405.14734, eq. 4).
    """
    if pairs.ref_chosen_logprobs is None:
        chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    else:
        chosen_B, rejected_B = log_ratios(pairs)
    return beta * chosen_B.detach(), beta * rejected_B.detach()


def preference_metrics(pairs: PairLogprobs, *, beta: float, num_pairs: int) -> Metrics:
    """Return the parts of the means over the step of the implicit rewards, their difference and the accuracy."""
    chosen_B, rejected_B = implicit_rewards(pairs, beta=beta)
    return reward_metrics(chosen_B, rejected_B, num_pairs=num_pairs)


def _rewards(pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]:
    """Return the implicit rewards with gradient."""
    chosen_B, rejected_B = log_ratios(pairs)
    return beta * chosen_B, beta * rejected_B


def _difference(pairs: PairLogprobs) -> Tensor:
    """Return d. Each response's reference is subtracted first: equal magnitudes cancel, and few digits are lost."""
    chosen_B, rejected_B = log_ratios(pairs)
    return chosen_B - rejected_B


def _averaged(pairs: PairLogprobs, chosen_B: Tensor, rejected_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over tokens as means; a response without trained tokens has 0."""
    return chosen_B / pairs.chosen_lengths.clamp(min=1.0), rejected_B / pairs.rejected_lengths.clamp(min=1.0)


def _smoothed(scaled_B: Tensor, label_smoothing: float) -> Tensor:
    """Return `-(1 - e) log s(x) - e log s(-x)`."""
    return -(1.0 - label_smoothing) * logsigmoid(scaled_B) - label_smoothing * logsigmoid(-scaled_B)


def _log_complement(logprobs_B: Tensor) -> Tensor:
    """Return `log(1 - exp(logprobs))`, finite and without gradient if the probability is 1 to the last digits."""
    return torch.log(-torch.expm1(logprobs_B.clamp(max=MAX_ODDS_LOGPROB)))
