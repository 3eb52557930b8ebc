"""Preference losses on pairs of responses."""

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.aggregation import combine_metrics
from rlhf_cli.algorithms.preference import (
    PairLogprobs,
    PreferenceSettings,
    aot_partners,
    implicit_rewards,
    length_weights,
    mixed_loss,
    preference_loss,
    preference_losses,
    preference_metrics,
)
from rlhf_cli.algorithms.reward_model import pair_mean
from rlhf_cli.config.preference import PAIR_LOSSES, FDivergence

LN2, LN3 = math.log(2), math.log(3)
DELTA = 0.3  # fixed delta of bco_pair for tests that do not measure it


def make_pairs(num_pairs: int = 9, seed: int = 1, dtype: torch.dtype = torch.float64) -> PairLogprobs:
    """Return random pairs with log-ratios of a few nats, negative log-probs, and the constants of the step."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = -2.0 - 30.0 * torch.rand(2, num_pairs, generator=generator, dtype=dtype)
    noise = torch.randn(2, num_pairs, generator=generator, dtype=dtype)
    lengths = torch.randint(1, 20, (2, num_pairs), generator=generator).to(dtype)
    pairs = PairLogprobs(chosen, rejected, chosen + 4 * noise[0], rejected + 4 * noise[1], *lengths)
    return replace(pairs, aot_partner=aot_partners(pairs), bco_delta=DELTA)


def sliced(pairs: PairLogprobs, piece: slice) -> PairLogprobs:
    values = {field.name: getattr(pairs, field.name) for field in fields(pairs)}
    return PairLogprobs(**{k: v[piece] if isinstance(v, Tensor) and v.ndim else v for k, v in values.items()})


def references(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    assert pairs.ref_chosen_logprobs is not None
    assert pairs.ref_rejected_logprobs is not None
    return pairs.ref_chosen_logprobs, pairs.ref_rejected_logprobs


def leaves(pairs: PairLogprobs) -> tuple[PairLogprobs, Tensor, Tensor]:
    """Return the pairs with log-probs that require gradients."""
    chosen = pairs.chosen_logprobs.detach().clone().requires_grad_()
    rejected = pairs.rejected_logprobs.detach().clone().requires_grad_()
    return replace(pairs, chosen_logprobs=chosen, rejected_logprobs=rejected), chosen, rejected


def gradients(loss: Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(loss, (chosen, rejected))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# One pair for all losses: h_c = ln 2 and h_r = -ln 2 at beta 1, so s(h_c) = 2/3, s(h_r) = 1/3 and s(d) = 4/5.
# Both responses have two tokens with geometric mean probability 1/2 and 1/4. v = ref_c - ref_r = 0, u = 2 ln 2.
HAND_PAIR = PairLogprobs(
    chosen_logprobs=torch.tensor([-2 * LN2], dtype=torch.float64),
    rejected_logprobs=torch.tensor([-4 * LN2], dtype=torch.float64),
    ref_chosen_logprobs=torch.tensor([-3 * LN2], dtype=torch.float64),
    ref_rejected_logprobs=torch.tensor([-3 * LN2], dtype=torch.float64),
    chosen_lengths=torch.tensor([2.0], dtype=torch.float64),
    rejected_lengths=torch.tensor([2.0], dtype=torch.float64),
)


@pytest.mark.parametrize(
    ("name", "settings", "constants", "loss"),
    [
        ("sigmoid", {}, {}, math.log(5 / 4)),
        ("sigmoid", {"label_smoothing": 0.1}, {}, 0.9 * math.log(5 / 4) + 0.1 * math.log(5)),
        ("ipo", {}, {}, (LN2 - 1 / 2) ** 2),  # (ln 2 + ln 2) / 2 tokens
        ("hinge", {"beta": 0.5}, {}, 1 - LN2),
        ("hinge", {}, {}, 0.0),  # d = 1.39 is beyond the margin of 1
        ("robust", {"label_smoothing": 0.1}, {}, (0.9 * math.log(5 / 4) - 0.1 * math.log(5)) / 0.8),
        ("sppo_hard", {}, {}, 2 * (LN2 - 1 / 2) ** 2),
        ("nca_pair", {}, {}, math.log(3 / 2) + math.log(3) / 2 + math.log(3 / 2) / 2),
        ("exo_pair", {"label_smoothing": 0.1}, {}, 0.8 * math.log(0.8 / 0.9) + 0.2 * math.log(0.2 / 0.1)),
        ("exo_pair", {}, {}, 0.8 * math.log(0.8 / 0.999) + 0.2 * math.log(0.2 / 0.001)),  # 0 is 1e-3
        ("apo_zero", {}, {}, 1 / 3 + 1 / 3),
        ("apo_down", {}, {}, 2 / 3 + 1 / 5),
        ("bco_pair", {}, {"bco_delta": 0.0}, 2 * math.log(3 / 2)),
        ("bco_pair", {}, {"bco_delta": LN2}, LN2 + math.log(5 / 4)),  # s(0) and s(2 ln 2)
        ("aot", {}, {"aot_partner": torch.tensor([LN2])}, math.log(3 / 2)),  # u - v' = ln 2
        ("aot", {"label_smoothing": 0.1}, {"aot_partner": torch.tensor([LN2])}, 0.9 * math.log(3 / 2) + 0.1 * LN3),
        ("discopop", {"discopop_tau": 1.0}, {}, math.log(5 / 4) / 5 + 4 / 5 / 4),
        ("discopop", {"discopop_tau": 0.5}, {}, math.log(5 / 4) / 17 + 16 / 17 / 4),  # s(2 ln 4) = 16/17
        ("sigmoid_norm", {}, {}, math.log(3 / 2)),
        ("simpo", {"simpo_gamma": 0.0}, {}, math.log(3 / 2)),
        ("simpo", {"simpo_gamma": LN2}, {}, LN2),
        ("simpo", {"beta": 2.0, "simpo_gamma": LN2}, {}, math.log(3 / 2)),  # gamma is not scaled by beta
        ("orpo", {"orpo_lambda": 0.0}, {}, LN2),
        ("orpo", {"orpo_lambda": 0.5}, {}, LN2 + 0.5 * math.log(4 / 3)),  # odds 1 and 1/3: s(ln 3) = 3/4
    ],
)
def test_losses_by_hand(name, settings, constants, loss) -> None:
    pairs = replace(HAND_PAIR, **constants)
    found_B = preference_loss(name).function(pairs, PreferenceSettings(**{"beta": 1.0} | settings))
    assert found_B.tolist() == pytest.approx([loss], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "d"),
    [
        ({"f_divergence_type": "forward_kl"}, 3 / 2),  # (1 - 1/2) - (1 - 2)
        ({"f_divergence_type": "js_divergence"}, LN2),  # ln (2/3) - ln (1/3)
        ({"f_divergence_type": "alpha_divergence"}, math.sqrt(2)),  # 2 (1 - 1/sqrt 2) - 2 (1 - sqrt 2)
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.0}, 3 / 2),
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, 2 * LN2),
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0}, 3 / 2),  # (2 - 1) - (1/2 - 1)
    ],
)
def test_other_divergences_by_hand(settings, d) -> None:
    given = PreferenceSettings(beta=0.5, **settings)
    losses = {name: preference_loss(name).function(HAND_PAIR, given).item() for name in ("sigmoid", "hinge", "ipo")}
    expected = {"sigmoid": math.log1p(math.exp(-d / 2)), "hinge": max(0.0, 1 - d / 2), "ipo": (d / 2 - 1) ** 2}
    assert losses == pytest.approx(expected)


def test_tokens_beyond_the_shorter_response_have_another_weight() -> None:
    """Responses with 3 and 1, 0 and 2, and 2 and 2 trained tokens."""
    cu = torch.tensor([0, 3, 4, 4, 6, 8, 10])
    assert length_weights(cu, 10, ld_alpha=0.25).tolist() == [1, 0.25, 0.25, 1, 0.25, 0.25, 1, 1, 1, 1]
    assert length_weights(torch.tensor([0]), 0, ld_alpha=0.25).tolist() == []


SLOW_SETTINGS = PreferenceSettings(beta=0.3, label_smoothing=0.2, simpo_gamma=0.7, discopop_tau=0.6, orpo_lambda=0.4)


def slow_loss(name: str, c: float, r: float, ref_c: float, ref_r: float, len_c: float, len_r: float, v: float) -> float:
    """Compute the formulas of the papers on floats; c and r are log-probs, v is AOT's partner."""
    b, e, gamma, tau, lam = 0.3, 0.2, 0.7, 0.6, 0.4
    h_c, h_r = c - ref_c, r - ref_r
    d = h_c - h_r

    def log_s(x: float) -> float:
        return math.log(logistic(x))

    def smoothed(x: float) -> float:
        return -(1 - e) * log_s(x) - e * log_s(-x)

    def odds(logprob: float) -> float:
        return math.exp(logprob) / (1 - math.exp(logprob))

    blend, q = logistic(b * d / tau), logistic(b * d)
    return {
        "sigmoid": lambda: smoothed(b * d),
        "ipo": lambda: (h_c / len_c - h_r / len_r - 1 / (2 * b)) ** 2,
        "hinge": lambda: max(0.0, 1 - b * d),
        "robust": lambda: (-(1 - e) * log_s(b * d) + e * log_s(-b * d)) / (1 - 2 * e),
        "sppo_hard": lambda: (h_c - 1 / (2 * b)) ** 2 + (h_r + 1 / (2 * b)) ** 2,
        "nca_pair": lambda: -log_s(b * h_c) - log_s(-b * h_c) / 2 - log_s(-b * h_r) / 2,
        "exo_pair": lambda: q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e),
        "apo_zero": lambda: 1 - logistic(b * h_c) + logistic(b * h_r),
        "apo_down": lambda: logistic(b * h_c) + 1 - logistic(b * d),
        "bco_pair": lambda: -log_s(b * h_c - DELTA) - log_s(-(b * h_r - DELTA)),
        "aot": lambda: smoothed(b * (c - r - v)),
        "discopop": lambda: (1 - blend) * -log_s(b * d) + blend * math.exp(-b * d),
        "sigmoid_norm": lambda: smoothed(b * (h_c / len_c - h_r / len_r)),
        "simpo": lambda: -log_s(b * (c / len_c - r / len_r) - gamma),
        "orpo": lambda: -c / len_c - lam * log_s(math.log(odds(c / len_c)) - math.log(odds(r / len_r))),
    }[name]()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_and_gradients_equal_the_printed_formulas(name) -> None:
    pairs, chosen, rejected = leaves(make_pairs())
    loss_B = preference_loss(name).function(pairs, SLOW_SETTINGS)
    by_chosen_B, by_rejected_B = gradients(loss_B.sum(), chosen, rejected)
    assert pairs.aot_partner is not None
    columns = (chosen, rejected, *references(pairs), pairs.chosen_lengths, pairs.rejected_lengths, pairs.aot_partner)
    step = 1e-5
    for i, (c, r, *others) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        by_chosen = (slow_loss(name, c + step, r, *others) - slow_loss(name, c - step, r, *others)) / (2 * step)
        by_rejected = (slow_loss(name, c, r + step, *others) - slow_loss(name, c, r - step, *others)) / (2 * step)
        assert loss_B[i].item() == pytest.approx(slow_loss(name, c, r, *others), rel=1e-9, abs=1e-12)
        assert by_chosen_B[i].item() == pytest.approx(by_chosen, rel=1e-5, abs=1e-8)
        assert by_rejected_B[i].item() == pytest.approx(by_rejected, rel=1e-5, abs=1e-8)


def extreme_pairs() -> PairLogprobs:
    """Return all combinations of log-ratios +-1000 and 0 with log-probs 0 and -2000, for short and long responses."""
    cases = [
        (lp_c, lp_r, lp_c - h_c, lp_r - h_r, length, length)
        for lp_c in (0.0, -2000.0)
        for lp_r in (0.0, -2000.0)
        for h_c in (1000.0, 0.0, -1000.0)
        for h_r in (1000.0, 0.0, -1000.0)
        for length in (0.0, 1.0, 500.0)
    ]
    pairs = PairLogprobs(*torch.tensor(cases).T.contiguous())
    return replace(pairs, aot_partner=aot_partners(pairs), bco_delta=0.0)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_extreme_log_ratios_give_a_finite_loss_and_gradient(name, beta) -> None:
    kinds: tuple[FDivergence, ...] = get_args(FDivergence)
    divergences = [PreferenceSettings(beta=beta, f_divergence_type=kind) for kind in kinds]
    for settings in (*divergences, PreferenceSettings(beta=beta, label_smoothing=0.1)):
        pairs, chosen, rejected = leaves(extreme_pairs())
        loss_B = preference_loss(name).function(pairs, settings)
        assert loss_B.isfinite().all()
        for gradient_B in gradients(loss_B.sum(), chosen, rejected):
            assert gradient_B.isfinite().all()


def test_discopop_keeps_its_value_where_its_exponential_alone_is_infinite() -> None:
    # x = 0.1 * -1500 = -150, exp(150) overflows float32; the blend s(-3000) leaves -log s(-150) = 150.
    pairs, chosen, rejected = leaves(make_pairs(1, dtype=torch.float32))
    pairs = replace(pairs, ref_chosen_logprobs=chosen.detach() + 1500, ref_rejected_logprobs=rejected.detach())
    loss_B = preference_loss("discopop").function(pairs, PreferenceSettings())
    assert loss_B.item() == pytest.approx(150.0)
    by_chosen_B, by_rejected_B = gradients(loss_B.sum(), chosen, rejected)
    assert (by_chosen_B.item(), by_rejected_B.item()) == pytest.approx((-0.1, 0.1))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_cutting_the_step_changes_neither_loss_nor_gradient(name) -> None:
    pairs, chosen, rejected = leaves(make_pairs(11))
    function = preference_loss(name).function
    whole = function(pairs, SLOW_SETTINGS).mean()
    pieces = [slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 11)]
    parts = torch.stack([pair_mean(function(sliced(pairs, piece), SLOW_SETTINGS), 11) for piece in pieces])
    assert parts.sum().item() == pytest.approx(whole.item())
    for a, b in zip(gradients(whole, chosen, rejected), gradients(parts.sum(), chosen, rejected), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_aot_pair_by_pair_has_the_value_and_gradient_of_the_sorted_form(label_smoothing) -> None:
    """The reference implementation sorts both margins over the step and differentiates through the sort."""
    pairs, chosen, rejected = leaves(make_pairs(17))
    settings = PreferenceSettings(beta=0.3, label_smoothing=label_smoothing)
    model_sorted = (chosen - rejected).sort().values
    ref_chosen, ref_rejected = references(pairs)
    reference_sorted = (ref_chosen - ref_rejected).sort().values
    scaled_B = 0.3 * (model_sorted - reference_sorted)
    coupled = (-(1 - label_smoothing) * logsigmoid(scaled_B) - label_smoothing * logsigmoid(-scaled_B)).mean()

    separate = torch.zeros((), dtype=torch.float64)
    for i in range(17):
        separate = separate + pair_mean(preference_loss("aot").function(sliced(pairs, slice(i, i + 1)), settings), 17)
    assert separate.item() == pytest.approx(coupled.item(), rel=1e-12)
    for a, b in zip(gradients(coupled, chosen, rejected), gradients(separate, chosen, rejected), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
        assert a.abs().min() > 0


def test_aot_partners_have_the_rank_of_their_pair() -> None:
    # u = 5, -1, 2 has ranks 2, 0, 1; v = 0.3, 0.1, 0.2 in order is 0.1, 0.2, 0.3.
    zeros, ones = torch.zeros(3), torch.ones(3)
    pairs = PairLogprobs(torch.tensor([5.0, -1.0, 2.0]), zeros, torch.tensor([0.3, 0.1, 0.2]), zeros, ones, ones)
    assert aot_partners(pairs).tolist() == pytest.approx([0.3, 0.1, 0.2])
    swapped = replace(pairs, ref_chosen_logprobs=torch.tensor([0.1, 0.2, 0.3]))
    assert aot_partners(swapped).tolist() == pytest.approx([0.3, 0.1, 0.2])


def test_aot_partners_depend_on_the_whole_step_and_carry_no_gradient() -> None:
    pairs, _, _ = leaves(make_pairs(8))
    whole = aot_partners(pairs)
    halves = torch.cat([aot_partners(sliced(pairs, slice(0, 4))), aot_partners(sliced(pairs, slice(4, 8)))])
    assert not torch.equal(whole, halves)
    assert not whole.requires_grad


def test_no_gradient_flows_through_bco_delta() -> None:
    pairs, chosen, rejected = leaves(make_pairs(5))
    function = preference_loss("bco_pair").function
    with_graph = replace(pairs, bco_delta=chosen.mean())
    constant = replace(pairs, bco_delta=chosen.mean().item())
    found = gradients(function(with_graph, SLOW_SETTINGS).sum(), chosen, rejected)
    expected = gradients(function(constant, SLOW_SETTINGS).sum(), chosen, rejected)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_losses_without_a_reference_are_named_and_do_not_look_at_one() -> None:
    free = {name for name, row in PAIR_LOSSES.items() if not row.needs_reference}
    assert free == {"simpo", "orpo"}
    pairs = make_pairs()
    without = replace(pairs, ref_chosen_logprobs=None, ref_rejected_logprobs=None)
    for name in free:
        function = preference_loss(name).function
        assert torch.equal(function(pairs, SLOW_SETTINGS), function(without, SLOW_SETTINGS))


@pytest.mark.parametrize("name", [name for name, row in PAIR_LOSSES.items() if row.needs_reference])
def test_a_loss_that_needs_a_reference_depends_on_both_log_probs(name) -> None:
    pairs = make_pairs()
    ref_chosen, ref_rejected = references(pairs)
    moved_chosen = replace(pairs, ref_chosen_logprobs=ref_chosen + 1.0)
    moved_rejected = replace(pairs, ref_rejected_logprobs=ref_rejected + 1.0)
    function = preference_loss(name).function
    for moved in (moved_chosen, moved_rejected):
        partners = aot_partners(moved)
        loss_B = function(replace(moved, aot_partner=partners), SLOW_SETTINGS)
        assert not torch.allclose(function(pairs, SLOW_SETTINGS), loss_B)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_what_a_row_says_it_needs_is_what_it_fails_without(name) -> None:
    row, pairs = preference_loss(name), make_pairs()
    for constant in ("aot_partner", "bco_delta"):
        without = replace(pairs, **{constant: None})
        if row.step_constant == constant:
            with pytest.raises(AssertionError, match=name):
                row.function(without, SLOW_SETTINGS)
        else:
            assert torch.equal(row.function(without, SLOW_SETTINGS), row.function(pairs, SLOW_SETTINGS))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_row_names_exactly_the_settings_that_change_its_loss(name) -> None:
    row, pairs = preference_loss(name), make_pairs()
    given = replace(SLOW_SETTINGS, f_divergence_type="alpha_divergence")
    other = PreferenceSettings(
        beta=0.4,
        label_smoothing=0.3,
        simpo_gamma=0.9,
        discopop_tau=0.2,
        orpo_lambda=0.8,
        f_divergence_type="js_divergence",
        f_alpha_divergence_coef=0.2,
    )
    names = {field.name for field in fields(PreferenceSettings)}
    before_B = row.function(pairs, given)
    after = {key: row.function(pairs, replace(given, **{key: getattr(other, key)})) for key in names}
    assert {key for key, loss_B in after.items() if not torch.equal(before_B, loss_B)} == row.settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"beta": math.nan}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing must be at least 0 and below 0.5, not 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"discopop_tau": 0.0}, "discopop_tau must be above 0 and at most 1"),
        ({"discopop_tau": 1.5}, "discopop_tau must be above 0 and at most 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceSettings(**settings)


def test_robust_loss_of_noisy_labels_is_the_dpo_loss_of_clean_ones_in_the_mean() -> None:
    pairs = make_pairs()
    swapped = PairLogprobs(
        pairs.rejected_logprobs,
        pairs.chosen_logprobs,
        pairs.ref_rejected_logprobs,
        pairs.ref_chosen_logprobs,
        pairs.rejected_lengths,
        pairs.chosen_lengths,
    )
    settings = PreferenceSettings(label_smoothing=0.2)
    robust = preference_loss("robust").function
    noisy_B = 0.8 * robust(pairs, settings) + 0.2 * robust(swapped, settings)
    assert torch.allclose(noisy_B, preference_loss("sigmoid").function(pairs, PreferenceSettings()))


def test_a_mix_is_the_weighted_sum_in_value_and_gradient() -> None:
    pairs, chosen, rejected = leaves(make_pairs())
    names, weights = ["sigmoid", "bco_pair", "simpo"], [0.8, 0.2, 1.5]
    mixed_B = mixed_loss(names, weights, pairs, SLOW_SETTINGS)
    by_hand_B = sum(
        weight * preference_loss(name).function(pairs, SLOW_SETTINGS)
        for name, weight in zip(names, weights, strict=True)
    )
    assert isinstance(by_hand_B, Tensor)
    assert mixed_B.shape == (9,)
    assert torch.allclose(mixed_B, by_hand_B)
    found = gradients(mixed_B.sum(), chosen, rejected)
    expected = gradients(by_hand_B.sum(), chosen, rejected)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_a_mix_with_an_unknown_name_or_too_few_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of sigmoid, ipo, .*, orpo, not 'dpo'"):
        preference_losses(["sigmoid", "dpo"])
    for names, weights in ((["sigmoid", "ipo"], [1.0]), ([], [])):
        with pytest.raises(ValueError, match=f"one weight: there are {len(names)} and {len(weights)}"):
            mixed_loss(names, weights, make_pairs(), SLOW_SETTINGS)


def test_implicit_rewards_are_scaled_log_ratios_or_mean_log_probs_without_a_reference() -> None:
    pairs, _, _ = leaves(HAND_PAIR)
    chosen_B, rejected_B = implicit_rewards(pairs, beta=0.5)
    assert not chosen_B.requires_grad
    assert not rejected_B.requires_grad
    assert (chosen_B.item(), rejected_B.item()) == pytest.approx((0.5 * LN2, -0.5 * LN2))
    without = replace(HAND_PAIR, ref_chosen_logprobs=None, ref_rejected_logprobs=None)
    chosen_B, rejected_B = implicit_rewards(without, beta=0.5)
    assert (chosen_B.item(), rejected_B.item()) == pytest.approx((-0.5 * LN2, -1.0 * LN2))


def test_metrics_of_the_pieces_add_up_to_the_means_of_the_step() -> None:
    pairs, _, _ = leaves(make_pairs(10))
    parts: dict[str, Tensor] = {}
    for piece in (slice(0, 3), slice(3, 3), slice(3, 10)):
        parts = combine_metrics(parts, preference_metrics(sliced(pairs, piece), beta=0.2, num_pairs=10))
    ref_chosen, ref_rejected = references(pairs)
    chosen = [0.2 * x for x in (pairs.chosen_logprobs - ref_chosen).tolist()]
    rejected = [0.2 * x for x in (pairs.rejected_logprobs - ref_rejected).tolist()]
    assert {name: value.item() for name, value in parts.items()} == pytest.approx(
        {
            "chosen_reward": sum(chosen) / 10,
            "rejected_reward": sum(rejected) / 10,
            "reward_margin": sum(c - r for c, r in zip(chosen, rejected, strict=True)) / 10,
            "accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 10,
        }
    )
    assert not any(value.requires_grad for value in parts.values())


def test_a_policy_that_is_its_reference_is_right_half_the_time() -> None:
    pairs = make_pairs(4)
    same = replace(pairs, ref_chosen_logprobs=pairs.chosen_logprobs, ref_rejected_logprobs=pairs.rejected_logprobs)
    assert preference_metrics(same, beta=0.1, num_pairs=4)["accuracy"].item() == 0.5
