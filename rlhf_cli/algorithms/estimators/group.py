"""GRPO and variants: advantages relative to the other responses to the prompt (arXiv 2402.03300)."""

from statistics import fmean, stdev
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.config.base import Needs
from rlhf_cli.config.policy import PolicyConfig

DEFAULTS_OF_LOSS: dict[str, dict[str, object]] = {
    "gspo": {"eps_clip_low_high": (3e-4, 4e-4), "loss_agg": "seq_mean"},
    "gmpo": {"loss_agg": "seq_mean"},
}
"""Defaults that a policy loss changes, also without a preset."""

PRESETS: dict[str, dict[str, object]] = {
    "dr_grpo": {"advantage_std": "none", "loss_agg": "seq_sum_norm", "init_kl_coef": 0.0},
    "dapo": {
        "eps_clip_low_high": (0.2, 0.28),
        "loss_agg": "token_mean",
        "init_kl_coef": 0.0,
        "dynamic_filtering": True,
    },
    "gspo": {"policy_loss": "gspo", "init_kl_coef": 0.0, **DEFAULTS_OF_LOSS["gspo"]},
    "cispo": {"policy_loss": "cispo", "loss_agg": "token_mean", "init_kl_coef": 0.0},
    "sapo": {"policy_loss": "sapo", "loss_agg": "seq_mean", "init_kl_coef": 0.0},
    "dppo": {"policy_loss": "dppo_tv", "loss_agg": "token_mean", "init_kl_coef": 0.0},
    "gmpo": {"policy_loss": "gmpo", "init_kl_coef": 0.0, **DEFAULTS_OF_LOSS["gmpo"]},
    "vespo": {"policy_loss": "vespo", "loss_agg": "token_mean", "init_kl_coef": 0.0},
    "luspo": {"policy_loss": "gspo", "init_kl_coef": 0.0, "eps_clip_low_high": (3e-4, 4e-4)},
    "online_dpo": {
        "advantage": "dpo",
        "init_kl_coef": 0.1,
        "use_kl_loss": False,
        "kl_estimator": "k1",
        "loss_agg": "seq_sum_norm",
    },
}
"""Hyperparameters from the papers, without batch sizes and lengths."""


class GroupPolicyConfig(PolicyConfig):
    """Policy objective"""

    preset: Literal[*PRESETS] | None = None  # type: ignore[valid-type]
    """Defaults from a paper for loss, aggregation, clipping, KL and length penalty. Explicit settings take precedence;
    with use_kl_loss, init_kl_coef keeps its default.
    """
    advantage: Literal["group", "dpo", "gigpo", "passk", "maxrl"] = "group"
    """group: reward minus the prompt's mean reward. dpo: gradient of the DPO loss on the best and the worst response,
    with init_kl_coef as beta (preset online_dpo). gigpo: for episodes, group plus the same for each turn, compared
    with turns that follow the same observation. passk: best minus second-best reward, 0 for the others. maxrl: reward
    minus the prompt's mean, divided by the mean, for rewards that are not negative.
    """
    gigpo_weight: Annotated[float, Needs("advantage", ("gigpo",))] = Field(1.0, ge=0)
    """Weight of the advantages of turns in gigpo."""
    gigpo_gamma: Annotated[float, Needs("advantage", ("gigpo",))] = Field(0.95, ge=0, le=1)
    """Discount per turn of the returns that gigpo compares."""
    advantage_std: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the prompt's rewards (group), of all rewards of the iteration
    (batch, Lite PPO), or not (none, Dr. GRPO).
    """
    aggregate: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Normalize the sum of all rewards, or each reward separately before the weighted sum (GDPO)."""

    @model_validator(mode="after")
    def _check_passk(self) -> "GroupPolicyConfig":
        unsupported = {"group": (), "gigpo": ("batch",)}.get(self.advantage, ("batch", "none"))
        if self.advantage_std in unsupported:
            raise ValueError(f"advantage {self.advantage} does not support advantage_std {self.advantage_std}")
        return self

    @model_validator(mode="after")
    def _check_dpo(self) -> "GroupPolicyConfig":
        if self.advantage != "dpo":
            return self
        # The penalty in the reward is beta times the log-ratio, from which the margin is computed.
        if self.use_kl_loss or self.kl_estimator != "k1" or not self.init_kl_coef:
            raise ValueError(
                "advantage dpo reads beta and the log-ratios from the KL penalty in the reward: set preset online_dpo, "
                "or no_use_kl_loss, kl_estimator k1 and init_kl_coef above 0"
            )
        if self.kl_target is not None:
            raise ValueError("advantage dpo has a constant beta (init_kl_coef): leave out kl_target")
        return self

    @model_validator(mode="after")
    def _check_aggregate(self) -> "GroupPolicyConfig":
        if self.aggregate == "sum_then_normalize":
            return self
        for name in ("advantage", "advantage_std"):
            if getattr(self, name) != "group":
                raise ValueError(f"aggregate normalize_then_sum does not support {name} {getattr(self, name)}")
        if self.init_kl_coef > 0 and not self.use_kl_loss:
            raise ValueError("aggregate normalize_then_sum requires the KL penalty in the loss: set use_kl_loss")
        return self

    @property
    def estimator(self) -> str:
        """Name of the estimator for these settings."""
        if self.aggregate == "normalize_then_sum":
            return "gdpo"
        names = {"passk": "grpo_passk", "maxrl": "grpo_maxrl", "dpo": "grpo_dpo", "gigpo": "gigpo"}
        return names.get(self.advantage, "grpo")


def grpo(experience: Experience, settings: GroupPolicyConfig) -> Advantages:
    """Return `(R_i - mean) / std` over the group; the std is of all rewards for `advantage_std batch`, 1 for none."""
    from rlhf_cli.algorithms.groups import group_normalised, less_group_mean, over_batch_std

    rewards_B, groups_B = experience.rewards_B, experience.groups_B
    # Dr. GRPO (arXiv 2503.20783): dividing by the std overweights prompts that are almost always or almost never
    # solved.
    if settings.advantage_std == "none":
        advantages_B = less_group_mean(rewards_B, groups_B)
    elif settings.advantage_std == "batch":
        advantages_B = over_batch_std(rewards_B, groups_B, scale=experience.scale)
    else:
        advantages_B = group_normalised(rewards_B, groups_B, scale=experience.scale)
    return Advantages(per_response_B=advantages_B)


def maxrl(experience: Experience, _: object) -> Advantages:
    """Return `(R_i - mean) / mean` over the group (arXiv 2602.02710), 0 if the mean is 0.

    With rewards of 0 and 1, a prompt that is solved once in n has the weight n: the gradient of the log of the chance
    to solve it.

    Raises:
        RunError: a reward is negative.
    """
    from rlhf_cli.algorithms.groups import over_group_mean
    from rlhf_cli.errors import RunError

    if bool((experience.rewards_B < 0).any()):
        raise RunError("--advantage maxrl divides by the mean reward of a prompt, and a reward is negative")
    return Advantages(per_response_B=over_group_mean(experience.rewards_B, experience.groups_B))


def passk(experience: Experience, _: object) -> Advantages:
    """Return best minus second-best reward for the best response in a group, and 0 for the others."""
    from rlhf_cli.algorithms.groups import best_over_second

    advantages_B = best_over_second(experience.rewards_B, experience.groups_B, scale=experience.scale)
    return Advantages(per_response_B=advantages_B)


def dpo(experience: Experience, settings: GroupPolicyConfig) -> Advantages:
    """Return `beta sigmoid(-beta d)` for the best response in a group, minus that for the worst, and 0 for the others.

    `d` is the log-ratio of policy to reference of the best response, less that of the worst. With the sum over tokens
    as loss, the first update has the gradient of the DPO loss (arXiv 2305.18290, eq. 7) on these pairs (online DPO,
    arXiv 2402.04792).
    """
    import torch

    from rlhf_cli.algorithms.groups import best_and_worst
    from rlhf_cli.algorithms.ragged import segment_lengths

    assert experience.scores_B is not None, "there are no rewards"
    signs_B, pairs_B = best_and_worst(experience.scores_B, experience.groups_B, among_B=experience.trained_B)
    # k1 in the reward is beta times the log-ratio; a response without tokens has none.
    ratios_B = (experience.scores_B - experience.rewards_B).where(segment_lengths(experience.cu) > 0, 0.0).double()
    margins_P = torch.bincount(pairs_B, weights=signs_B * ratios_B)
    weights_B = settings.init_kl_coef * torch.sigmoid(-margins_P)[pairs_B]
    in_pairs_P = torch.bincount(pairs_B, weights=signs_B.abs()) > 0
    metrics = {}
    if bool(in_pairs_P.any()):
        found_P = margins_P[in_pairs_P]
        metrics["pair_loss"] = float(-torch.nn.functional.logsigmoid(found_P).mean())
        metrics["pair_accuracy"] = float((found_P > 0).double().mean())
    return Advantages(per_response_B=signs_B * weights_B, metrics=metrics)


def gdpo(experience: Experience, _: object) -> Advantages:
    """Return the weighted sum of `(R_i - mean) / std` over all rewards, whitened over all responses."""
    import torch

    from rlhf_cli.algorithms.advantages import whiten
    from rlhf_cli.algorithms.groups import group_normalised

    # Normalize each reward before adding: in a sum, the reward with the largest range would dominate.
    apart_B = [weight * group_normalised(part_B, experience.groups_B) for weight, part_B in experience.parts]
    return Advantages(per_response_B=whiten(torch.stack(apart_B).sum(0)))


def grpo_formula(experience: Experience, settings: GroupPolicyConfig, sample: int, token: int) -> list[str]:
    """Return the formula of `grpo` with numbers."""
    from rlhf_cli.algorithms.formulas import less_mean_formula, normalised_formula, number

    if settings.advantage_std == "none":
        return [*less_mean_formula(experience, sample), "Dr. GRPO, arXiv 2503.20783"]
    if settings.advantage_std == "batch":
        found = grpo(experience, settings).per_response_B
        assert found is not None
        std = float(experience.rewards_B.double().std())
        lines = less_mean_formula(experience, sample)
        return [*lines, f"/ std {number(std)} of all rewards = {number(float(found[sample]))}", "arXiv 2508.08221"]
    lines, _ = normalised_formula(experience.rewards_B, experience.groups_B, sample, scale=experience.scale)
    return [*lines, "GRPO, arXiv 2402.03300"]


def maxrl_formula(experience: Experience, settings: object, sample: int, token: int) -> list[str]:
    """Return the formula of `maxrl` with numbers."""
    from rlhf_cli.algorithms.formulas import group_of, number, shown_group

    rewards, place = group_of(experience.rewards_B, experience.groups_B, sample)
    found = maxrl(experience, settings).per_response_B
    assert found is not None
    mean = number(fmean(rewards))
    value = number(float(found[sample]))
    return [
        shown_group(rewards, place),
        f"A = (R - mean) / mean = ({number(rewards[place])} - {mean}) / {mean} = {value}",
        "MaxRL, arXiv 2602.02710",
    ]


def passk_formula(experience: Experience, settings: object, sample: int, token: int) -> list[str]:
    """Return the formula of `passk` with numbers."""
    from rlhf_cli.algorithms.formulas import group_of, number, shown_group

    rewards, place = group_of(experience.rewards_B, experience.groups_B, sample)
    found = passk(experience, settings).per_response_B
    assert found is not None
    std = stdev(rewards) if len(rewards) > 1 else 0.0
    second = max((reward for reward in rewards if reward < max(rewards)), default=max(rewards))
    return [
        shown_group(rewards, place),
        f"best {number(max(rewards))}, second {number(second)}, std {number(std)}",
        f"A = (best - second) / (std + eps) for the best response, 0 for the rest: here {number(float(found[sample]))}",
        "arXiv 2503.19595",
    ]


def dpo_formula(experience: Experience, settings: GroupPolicyConfig, sample: int, token: int) -> list[str]:
    """Return the formula of `dpo` with numbers."""
    from rlhf_cli.algorithms.formulas import group_of, number, shown_group

    assert experience.scores_B is not None
    scores, place = group_of(experience.scores_B, experience.groups_B, sample)
    found = dpo(experience, settings).per_response_B
    assert found is not None
    return [
        shown_group(scores, place),
        "A = beta sigmoid(-beta d) for the best response, minus that for the worst, 0 for the rest; beta "
        f"{number(settings.init_kl_coef)}: here {number(float(found[sample]))}",
        "online DPO, arXiv 2402.04792",
    ]


def gdpo_formula(experience: Experience, settings: object, sample: int, token: int) -> list[str]:
    """Return the formula of `gdpo` with numbers."""
    from rlhf_cli.algorithms.formulas import normalised_formula, number

    lines, total = list[str](), 0.0
    for weight, part_B in experience.parts:
        own, value = normalised_formula(part_B, experience.groups_B, sample)
        lines += [own[0], f"weight {number(weight)} x {own[1]}"]
        total += weight * value
    found = gdpo(experience, settings).per_response_B
    assert found is not None
    return [*lines, f"A = the sum {number(total)}, whitened over all responses: {number(float(found[sample]))}"]


GRPO = Estimator("grpo", grpo, min_group=2, steps="groups", formula=grpo_formula)
GRPO_MAXRL = Estimator("grpo_maxrl", maxrl, min_group=2, formula=maxrl_formula)
GRPO_PASSK = Estimator("grpo_passk", passk, min_group=2, formula=passk_formula)
GRPO_DPO = Estimator("grpo_dpo", dpo, min_group=2, formula=dpo_formula)
GDPO = Estimator("gdpo", gdpo, min_group=2, rewards_apart=True, formula=gdpo_formula)
