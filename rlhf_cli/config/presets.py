"""Defaults that depend on other settings. Explicitly given settings always take precedence.

Functions receive the given settings from flags and files, as text or typed values, and return defaults by name. A
resolved `config.yaml` contains the result.
"""

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from rlhf_cli.algorithms.estimators import gae, group
from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.episodes import environment_kind
from rlhf_cli.config.plugins import is_target
from rlhf_cli.config.policy import READ_BY
from rlhf_cli.config.preference import LOSS_DEFAULTS
from rlhf_cli.config.procedural import INSTRUCTION, REWARD, all_procedural
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.rollout import SamplingConfig

PRESETS = group.PRESETS | gae.PRESETS
"""Hyperparameters by preset, of all commands."""

# Last part of a response in which DAPO's penalty grows: 4,096 of 20,480 tokens.
_DAPO_BUFFER_SHARE = 0.2

ADAPTER_RATE = 10
"""Learning rate of an adapter as a multiple of the rate of full fine-tuning: the best rate is about ten times higher in
every model and task of "LoRA Without Regret" (Schulman et al. 2025, thinkingmachines.ai/blog/lora).
"""


def defaults_of_loss(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for the given `policy_loss`."""
    return _without_rivals(group.DEFAULTS_OF_LOSS.get(str(given.get("policy_loss")), {}), given)


def defaults_of_pair_loss(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for the given pairwise `loss`, if it is a single one."""
    loss = given.get("loss")
    name = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    return dict(LOSS_DEFAULTS.get(str(name), {}))


def defaults_of_preset(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for the given `preset`, combined with a given `policy_loss`."""
    defaults = dict(PRESETS.get(str(given.get("preset")), {}))
    if given.get("preset") == "dapo":
        defaults["overlong_buffer_len"] = _share_of_response(given)
    # A given loss may not use all settings of the preset, which would then be rejected.
    loss = given.get("policy_loss")
    if loss is not None:
        read = {
            name: value
            for name, value in defaults.items()
            if loss in READ_BY.get(name, (loss,)) or is_target(str(loss))
        }
        defaults = read | defaults_of_loss(given)
    return _without_rivals(defaults, given)


def defaults_of_baseline(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for the given `baseline`: with a group mean, KL belongs in the loss."""
    if given.get("baseline") != "group" or not _is_true(given.get("use_kl_loss", True)):
        return {}
    return {"use_kl_loss": True, "kl_estimator": "k2"}


def defaults_of_environment(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for an environment or agent program: its reward, if that kind has one, and its prompts."""
    environment = given.get("environment")
    kind = None if environment is None else environment_kind(str(environment))
    has_reward = kind not in (None, "mcp") or given.get("agent_command") is not None
    found: dict[str, object] = {"reward_funcs": [ENVIRONMENT]} if has_reward else {}
    if kind == "nemo_gym":
        found["input_key"] = "responses_create_params.input"  # the messages in its rows
    if kind == "verifiers":
        found["prompt_data"] = environment
    return found


_OTHER_REWARDS = ("reward_func", "reward_pretrain", "remote_rm_url", "judge", "teacher_pretrain")
_OTHER_WORDINGS = ("prompt_template", "input_template")


def defaults_of_prompts(given: Mapping[str, object], dataset: str) -> dict[str, object]:
    """Return the defaults for prompts of generated datasets, with the name of the setting that lists them: their
    reward, and a system prompt that asks for the tags from which it reads answers.
    """
    if not all_procedural(str(given.get(dataset))):
        return {}
    defaults: dict[str, object] = {}
    if not any(given.get(name) for name in _OTHER_REWARDS):
        defaults["reward_funcs"] = [REWARD]
    renders_system = _is_true(given.get("apply_chat_template", True))
    if renders_system and not any(given.get(name) for name in _OTHER_WORDINGS):
        defaults["system_prompt"] = INSTRUCTION
    return defaults


def defaults_of_adapter(given: Mapping[str, object], *groups: SettingsGroup) -> dict[str, object]:
    """Return learning rates for a new adapter: `ADAPTER_RATE` times the full fine-tuning rates in these groups."""
    # Flags are text here, because presets apply before validation.
    if str(given.get("lora_rank", 0)).strip() == "0":
        return {}
    rates = {name: rate for group in groups for name, rate in group if name.endswith("learning_rate")}
    # Six digits, so that 10 * 1e-6 is written as 1e-5.
    return {name: float(f"{ADAPTER_RATE * rate:.6g}") for name, rate in rates.items()}


def _defaults_of_teacher(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for a given teacher, which replaces the reference."""
    return {} if given.get("teacher_pretrain") is None else _without_rivals({"init_kl_coef": 0.0}, given)


def defaults_of_roles(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for a given teacher, prompts and environment."""
    return _defaults_of_teacher(given) | defaults_of_prompts(given, "prompt_data") | defaults_of_environment(given)


def _share_of_response(given: Mapping[str, object]) -> int:
    longest = given.get("max_new_tokens", SamplingConfig.model_fields["max_new_tokens"].default)
    try:
        return max(1, int(_DAPO_BUFFER_SHARE * int(str(longest))))
    except ValueError:
        return 1  # validation reports its fault later


def _without_rivals(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults that neither override nor contradict a given setting."""
    rivals = {
        "eps_clip_low_high": "eps_clip",
        "overlong_buffer_len": "stop_properly_penalty_coef",
        "lambd_alpha": "lambd",
    }
    kept = {name: value for name, value in defaults.items() if rivals.get(name) not in given}
    if _is_true(given.get("use_kl_loss", False)):  # who asks for the divergence does not mean a coefficient of 0
        kept.pop("init_kl_coef", None)
    return kept


def _is_true(given: object) -> bool:
    try:
        return TypeAdapter(bool).validate_python(given)
    except ValidationError:
        return True  # validation reports its fault later
