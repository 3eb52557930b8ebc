"""Translates losses, clipping and KL penalties from other frameworks.

Several foreign flags may determine one setting. Each function returns all settings that the flags determine; duplicates
are written once.
"""

import json

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.foreign.call import Call, Refused, Settings

_ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
}
"""KL estimator by verl name."""


def verl_kl(values: list[str], call: Call) -> Settings:
    """Translate the KL penalty in verl and EasyR1: in the loss, in the reward, or disabled."""
    easy = "algorithm.disable_kl" in call.values or "algorithm.kl_coef" in call.values
    in_loss = call.is_on("algorithm.use_kl_loss" if easy else "actor_rollout_ref.actor.use_kl_loss")
    in_reward = not in_loss if easy else call.is_on("algorithm.use_kl_in_reward")
    reward, loss = "algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.actor.kl_loss_coef"
    if reward in call.values and not in_reward:
        call.note(f"{reward} has no effect without algorithm.use_kl_in_reward (verl from April 2025 on)")
    if loss in call.values and not in_loss:
        call.note(f"{loss} has no effect without actor_rollout_ref.actor.use_kl_loss")
    if call.is_on("algorithm.disable_kl") or not (in_loss or in_reward):
        return {"init_kl_coef": ["0"]}
    if in_loss and in_reward:
        call.note("verl has a KL penalty in the loss and in the reward; rlhf has one, here in the loss")
    if easy:
        coef, name = call.value("algorithm.kl_coef") or "0.001", call.value("algorithm.kl_penalty") or "kl"
    elif in_loss:
        coef = call.value(loss) or "0.001"
        name = call.value("actor_rollout_ref.actor.kl_loss_type") or "low_var_kl"
    else:
        coef = call.value(reward) or "0.001"
        name = call.value("algorithm.kl_penalty") or "kl"
    estimator = _ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        raise Refused(f"the KL estimator {name} does not exist here; --kl_estimator has k1, k2 and k3")
    # The straight-through estimators, `k1+` and `k3+`, have the gradient of k2.
    if in_loss and (name.endswith("+") or estimator == "k1"):
        if estimator == "k1":
            call.note("the gradient of k1 in the loss is zero in expectation; k2 has the gradient of the divergence")
        estimator = "k2"
    return {"use_kl_loss" if in_loss else "no_use_kl_loss": [], "init_kl_coef": [coef], "kl_estimator": [estimator]}


def adaptive_kl(values: list[str], call: Call) -> Settings | None:
    """Translate the adaptive KL coefficient in verl, with target and horizon."""
    if values[0] != "adaptive" or not call.is_on("algorithm.use_kl_in_reward"):
        return None
    target = call.value("algorithm.kl_ctrl.target_kl") or "0.1"
    return {"kl_target": [target], "kl_horizon": [call.value("algorithm.kl_ctrl.horizon") or "10000"]}


_VERL_LOSSES = {
    **dict.fromkeys(("vanilla", "default"), "clip"),
    **dict.fromkeys(("gspo", "gspo_token"), "gspo"),
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gpg": "reinforce",
}


def _verl_loss(call: Call) -> str:
    """Return the policy loss; clip in place of a loss that does not exist here, which `verl_policy_loss` rejects."""
    name = call.value("actor_rollout_ref.actor.policy_loss.loss_mode", "worker.actor.loss_type") or "vanilla"
    return _VERL_LOSSES.get(name, "clip")


def verl_policy_loss(values: list[str], call: Call) -> Settings:
    """Translate the name of the policy loss in verl and EasyR1, with its clip range."""
    if values[0] not in _VERL_LOSSES:
        raise Refused(f"the policy loss {values[0]} does not exist here; --policy_loss is clip instead")
    return verl_clip(values, call)


def verl_clip(values: list[str], call: Call) -> Settings:
    """Translate the policy loss and clip range in verl and EasyR1."""
    actor, easy = "actor_rollout_ref.actor.", "worker.actor."
    loss = _verl_loss(call)
    common = call.value(f"{actor}clip_ratio")
    low = call.value(f"{actor}clip_ratio_low", f"{easy}clip_ratio_low") or common or "0.2"
    high = call.value(f"{actor}clip_ratio_high", f"{easy}clip_ratio_high") or common or low
    settings: Settings = {} if loss == "clip" else {"policy_loss": [loss]}
    if loss in ("clip", "gspo"):
        settings |= {"eps_clip": [low]} if float(low) == float(high) else {"eps_clip_low_high": [low, high]}
    dual = call.value(f"{actor}clip_ratio_c", f"{easy}clip_ratio_dual")
    if loss == "clip" and dual is not None:
        settings["dual_clip"] = [dual]
    if loss == "cispo":
        settings["cispo_eps_high"] = [f"{1 + float(high):g}"]
    if loss == "gmpo":
        settings["gmpo_log_clip"] = [high]
    if loss == "sapo":
        positive = call.value(f"{actor}tau_pos", f"{easy}tau_positive") or "1.0"
        settings["sapo_tau"] = [positive, call.value(f"{actor}tau_neg", f"{easy}tau_negative") or "1.05"]
    if loss.startswith("dppo"):
        settings["dppo_delta_low_high"] = [low, high]
    return settings


_AGGREGATIONS = {
    **dict.fromkeys(("token-mean", "token"), "token_mean"),
    **dict.fromkeys(("seq-mean-token-mean", "seq"), "seq_mean"),
    "seq-mean-token-sum-norm": "seq_sum_norm",
}


def verl_aggregation(values: list[str], call: Call) -> Settings:
    """Translate loss aggregation in verl; GSPO always uses the mean over sequences."""
    if _verl_loss(call) == "gspo":
        return {"loss_agg": ["seq_mean"]}
    if values[0] not in _AGGREGATIONS:
        raise Refused("there is no plain sum over tokens; --loss_agg seq_sum_norm divides it by max_new_tokens")
    return {"loss_agg": [_AGGREGATIONS[values[0]]]}


def trl_kl(values: list[str], call: Call) -> Settings | None:
    """Translate TRL's `beta`: GRPO adds k3 to the loss, RLOO subtracts k1 from the reward."""
    if call.command not in ONLINE_TRAINING:
        raise Refused("there is no setting with this name")
    if float(values[0]) == 0:
        return {"init_kl_coef": ["0"]}
    in_loss: Settings = {"use_kl_loss": [], "kl_estimator": ["k3"]}
    in_reward: Settings = {"no_use_kl_loss": [], "kl_estimator": ["k1"]}
    return {"init_kl_coef": values} | (in_loss if call.command == "grpo" else in_reward)


_TRL_ONLINE: dict[str, Settings] = {
    "grpo": {"loss_agg": ["seq_mean"]},
    "bnpo": {"loss_agg": ["token_mean"]},
    "dapo": {"loss_agg": ["token_mean"]},
    "dr_grpo": {"loss_agg": ["seq_sum_norm"]},
    "cispo": {"policy_loss": ["cispo"], "loss_agg": ["token_mean"]},
    "sapo": {"policy_loss": ["sapo"], "loss_agg": ["seq_mean"]},
}
_TRL_PAIRS = {"bco_pair": "bco_pair", "aot_unpaired": "aot", "aot_pair": "aot"}


def trl_loss(values: list[str], call: Call) -> Settings | None:
    """Translate `loss_type` in TRL: loss and aggregation for GRPO, otherwise the loss."""
    if call.command in ONLINE_TRAINING:
        if values[0] not in _TRL_ONLINE:
            raise Refused("use --policy_loss and --loss_agg; this loss of TRL does not exist here")
        return _TRL_ONLINE[values[0]]
    if values in (["nll"], ["kto"]):
        return None
    if "sft" in values:
        raise Refused("sft is --nll_loss_coef; pass the other losses as --loss, and their weights as --loss_weights")
    return {"loss": [",".join(_TRL_PAIRS.get(value, value) for value in values)]}


def trl_clip(values: list[str], call: Call) -> Settings | None:
    """Translate the clip range in TRL, `epsilon` and `epsilon_high`, for the loss selected by `loss_type`."""
    low = call.value("epsilon") or "0.2"
    high = call.value("epsilon_high") or low
    match call.value("loss_type"):
        case "cispo":
            return {"cispo_eps_high": [high]} if "epsilon_high" in call.values else None
        case "sapo":
            return None
    return {"eps_clip": [low]} if float(low) == float(high) else {"eps_clip_low_high": [low, high]}


_STDS = {"group": "group", "true": "group", "batch": "batch", "none": "none", "false": "none"}


def trl_scale(values: list[str], call: Call) -> Settings:
    """Translate whether TRL divides advantages by the standard deviation."""
    name = values[0].lower() if values else "true"
    if name not in _STDS:
        raise Refused("use --advantage_std group, batch or none")
    return {"advantage_std": [_STDS[name]]}


def trl_correction(values: list[str], call: Call) -> Settings:
    """Translate the correction for the mismatch between vLLM and trainer in TRL, which masks sequences by default."""
    if not (call.is_on("vllm_importance_sampling_correction") or "vllm_importance_sampling_mode" in call.values):
        return {"rollout_correction": ["off"]}
    mode = call.value("vllm_importance_sampling_mode") or "sequence_mask"
    cap = call.value("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap") or "3.0"
    if mode == "token_truncate":
        return {"rollout_correction": ["token_clip"], "rollout_correction_cap": [cap]}
    if mode == "token_mask":
        least = call.value("vllm_importance_sampling_clip_min") or "0"
        return {"rollout_correction": ["token_mask"], "rollout_correction_range": [least, cap]}
    raise Refused("no ratio of whole sequences as a product; --rollout_correction has token_clip and more")


def adam_betas(values: list[str], call: Call) -> Settings:
    """Join the two decay rates in transformers, 0.9 and 0.999 by default."""
    return {"adam_betas": [call.value("adam_beta1") or "0.9", call.value("adam_beta2") or "0.999"]}


def verl_schedule(values: list[str], call: Call) -> Settings:
    """Translate the schedule in verl and EasyR1; a cosine with a minimum is a separate schedule."""
    optim, easy = "actor_rollout_ref.actor.optim.", "worker.actor.optim."
    kinds = (f"{optim}warmup_style", f"{optim}lr_scheduler_type", f"{optim}lr_decay_style", f"{easy}lr_scheduler_type")
    kind = call.value(*kinds, "optim.lr_scheduler_type", "optim.lr_scheduler") or "constant"
    least = call.value(f"{optim}min_lr_ratio", f"{easy}min_lr_ratio", "optim.min_lr_ratio")
    if kind == "cosine" and least is not None and float(least) > 0:
        return {"lr_scheduler": ["cosine_with_min_lr"], "min_lr_ratio": [least]}
    return {"lr_scheduler": [kind]}


def schedule_options(values: list[str], call: Call) -> Settings:
    """Translate options for learning-rate schedules in transformers: the minimum of a cosine."""
    try:
        options = json.loads(values[0])
    except ValueError:
        options = None
    if not isinstance(options, dict) or options.keys() != {"min_lr_rate"}:
        raise Refused("use --min_lr_ratio, the final learning rate as a fraction of the peak")
    return {"min_lr_ratio": [str(options["min_lr_rate"])]}


def reference_steps(values: list[str], call: Call) -> Settings | None:
    """Translate the interval between reference updates in TRL, which requires `sync_ref_model`."""
    return {"ref_sync_steps": values} if call.is_on("sync_ref_model") else None


def reference_share(values: list[str], call: Call) -> Settings | None:
    """Translate the mixing weight for reference updates in TRL."""
    return {"ref_mixup_alpha": values} if call.is_on("sync_ref_model") else None


def prime_estimator(values: list[str], call: Call) -> Settings | None:
    """Translate advantages in prime-rl, which are not divided by the standard deviation."""
    if values[0] in ("grpo", "rl"):
        return {"advantage_std": ["none"]}
    if values[0] == "max_rl":
        return {"advantage": ["maxrl"]}
    if values[0] == "opd":  # the teacher is enough
        return None
    raise Refused(f"{values[0]} has no equivalent; rlhf grpo has --advantage and --teacher_pretrain")


def prime_loss(values: list[str], call: Call) -> Settings:
    """Translate the default loss in prime-rl, a trust region on probabilities around the rollout policy."""
    if call.value("trainer.loss.type") not in (None, "default"):
        raise Refused("this loss of prime-rl does not exist here; --policy_loss accepts a function in a file")
    low = call.value("trainer.loss.dppo_mask_low") or "0.2"
    high = call.value("trainer.loss.dppo_mask_high") or "0.2"
    return {"policy_loss": ["dppo_tv"], "dppo_delta_low_high": [low, high], "init_kl_coef": ["0"]}


def overlong(values: list[str], call: Call) -> Settings | None:
    """Translate the DAPO penalty for long responses, if it is enabled."""
    kwargs = ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg")
    for section in ("reward_model.overlong_buffer", *kwargs):
        if call.is_on(f"{section}.enable") and (length := call.value(f"{section}.len")):
            factor = call.value(f"{section}.penalty_factor") or "1.0"
            return {"overlong_buffer_len": [length], "overlong_penalty_factor": [factor]}
    return None


def filtered_range(values: list[str], call: Call) -> Settings | None:
    """Translate online filtering by mean score in EasyR1."""
    if not call.is_on("algorithm.online_filtering"):
        return None
    ends = [call.value("algorithm.filter_low") or "0.01", call.value("algorithm.filter_high") or "0.99"]
    return {"dynamic_filtering": [], "dynamic_filtering_reward_range": ends}
