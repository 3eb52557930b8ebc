"""Preference losses, and their reference model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin

StepConstant = Literal["aot_partner", "bco_delta"]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
RewardLossName = Literal["sigmoid", "logexp"]
_UnpairedLossName = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True, slots=True)
class _PairLossRow:
    """A pairwise loss: its function as `module:name`, its settings, and other requirements.

    `step_constant`: the field of `PairLogprobs` (algorithms/preference.py) that it requires.
    """

    function: str
    settings: frozenset[str]
    needs_reference: bool = True
    step_constant: StepConstant | None = None


def _own(
    name: str, *settings: str, needs_reference: bool = True, step_constant: StepConstant | None = None
) -> _PairLossRow:
    return _PairLossRow(f"rlhf_cli.algorithms.preference:{name}", frozenset(settings), needs_reference, step_constant)


_DIVERGENCE = ("f_divergence_type", "f_alpha_divergence_coef")

PAIR_LOSSES: dict[str, _PairLossRow] = {
    "sigmoid": _own("sigmoid_loss", "beta", "label_smoothing", *_DIVERGENCE),
    "ipo": _own("ipo_loss", "beta", *_DIVERGENCE),
    "hinge": _own("hinge_loss", "beta", *_DIVERGENCE),
    "robust": _own("robust_loss", "beta", "label_smoothing", *_DIVERGENCE),
    "sppo_hard": _own("sppo_hard_loss", "beta"),
    "nca_pair": _own("nca_pair_loss", "beta"),
    "exo_pair": _own("exo_pair_loss", "beta", "label_smoothing", *_DIVERGENCE),
    "apo_zero": _own("apo_zero_loss", "beta"),
    "apo_down": _own("apo_down_loss", "beta"),
    "bco_pair": _own("bco_pair_loss", "beta", step_constant="bco_delta"),
    "aot": _own("aot_loss", "beta", "label_smoothing", step_constant="aot_partner"),
    "discopop": _own("discopop_loss", "beta", "discopop_tau", *_DIVERGENCE),
    "sigmoid_norm": _own("sigmoid_norm_loss", "beta", "label_smoothing", *_DIVERGENCE),
    "simpo": _own("simpo_loss", "beta", "simpo_gamma", needs_reference=False),
    "orpo": _own("orpo_loss", "orpo_lambda", needs_reference=False),
}
"""Pairwise losses by name."""

LOSS_DEFAULTS: dict[str, dict[str, float]] = {
    "simpo": {"beta": 2.0, "simpo_gamma": 1.0},  # arXiv 2405.14734, of Llama 3 8B
    "sigmoid_norm": {"beta": 5.0},  # Tulu 3, arXiv 2411.15124
    "sppo_hard": {"beta": 0.001},  # arXiv 2405.00675: eta = 1000
    "nca_pair": {"beta": 0.01},  # arXiv 2402.05369: its alpha
    "bco_pair": {"beta": 0.01},  # arXiv 2404.04656
    "discopop": {"beta": 0.05},  # arXiv 2406.08414
}
"""Settings from the papers of losses with other values than DPO: defaults if the loss is used alone."""


class RewardLossConfig(SettingsGroup):
    """Loss"""

    loss: RewardLossName = "sigmoid"
    """Loss on the reward difference. logexp is OpenRLHF's name for sigmoid."""
    margin_loss: Annotated[bool, Needs("loss", ("sigmoid",))] = False
    """Subtract the row's `margin` from the reward difference."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared reward sum, which keeps the mean reward near zero."""


class PairLossConfig(SettingsGroup):
    """Loss"""

    loss: Annotated[list[str], Plugin(tuple(PAIR_LOSSES), ("pairs", "settings"), records=("PreferenceLoss",))] = [
        "sigmoid"
    ]
    """Pairwise losses; several are added. sigmoid is DPO, with label_smoothing cDPO."""
    loss_weights: list[float] = []
    """Weights of the losses. Default: 1."""
    beta: float = Field(0.1, gt=0)
    """Scale of the log-ratios; larger values keep the policy closer to the reference. Defaults of losses used alone:
    simpo 2, sigmoid_norm 5, sppo_hard 0.001, nca_pair and bco_pair 0.01, discopop 0.05.
    """
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with swapped labels (sigmoid, robust, exo_pair, aot, sigmoid_norm)."""
    simpo_gamma: float = 0.5
    """Target reward margin in simpo. Default: 1 if simpo is the only loss."""
    discopop_tau: float = Field(0.05, gt=0, le=1)
    """Temperature of the discopop mixture."""
    orpo_lambda: float = Field(0.1, ge=0)
    """Weight of orpo's odds ratio relative to its likelihood."""
    f_divergence_type: FDivergence = "reverse_kl"
    """Divergence from the reference (f-DPO, arXiv 2309.16240), in sigmoid, ipo, hinge, robust, exo_pair, discopop and
    sigmoid_norm.
    """
    f_alpha_divergence_coef: Annotated[float, Needs("f_divergence_type", ("alpha_divergence",))] = 0.5
    """Alpha of alpha_divergence: 0 is forward KL, 1 reverse KL."""
    use_weighting: bool = False
    """Weight a pair by the likelihood of both responses under the policy, as if the policy had sampled them (WPO, arXiv
    2406.11827).
    """
    ld_alpha: float = Field(1.0, ge=0, le=1)
    """Weight of the log-probs beyond the length of the shorter response, so that length counts less (LD-DPO, arXiv
    2409.06411).
    """
    nll_loss_coef: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood per token of chosen responses."""

    @model_validator(mode="after")
    def _check_losses(self) -> "PairLossConfig":
        if not self.loss:
            raise ValueError(f"loss names none of {', '.join(PAIR_LOSSES)}")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} weights for {len(self.loss)} losses")
        # A weight of 0 would compute a loss without effect.
        if any(weight <= 0 for weight in self.loss_weights):
            raise ValueError(f"loss_weights {','.join(f'{w:g}' for w in self.loss_weights)}: all must be above 0")
        self._check_options()
        return self

    def _check_options(self) -> None:
        """Raise ValueError for an option that one of the losses does not support."""
        rows = {name: PAIR_LOSSES[name] for name in self.loss if name in PAIR_LOSSES}
        unsupported = {
            "f_divergence_type": [name for name, row in rows.items() if "f_divergence_type" not in row.settings],
            # These act on log-ratios; aot combines those of different pairs.
            "use_weighting": [name for name, row in rows.items() if name == "aot" or not row.needs_reference],
            "ld_alpha": [name for name, row in rows.items() if not row.needs_reference],
        }
        for option, names in unsupported.items():
            if names and self.changed(option):
                raise ValueError(f"{option} does not support loss {names[0]}: remove one of them")


class UnpairedLossConfig(SettingsGroup):
    """Loss"""

    loss: _UnpairedLossName = "kto"
    """Loss on single responses. apo_zero_unpaired is kto without a KL baseline."""
    beta: float = Field(0.1, gt=0)
    """Scale of the log-ratios; larger values keep the policy closer to the reference."""
    desirable_loss_weight: float = Field(1.0, ge=0)
    """Weight of desirable responses. A recommended range is printed for unbalanced data."""
    undesirable_loss_weight: float = Field(1.0, ge=0)
    """Weight of undesirable responses."""
