"""Words of other tools' commands and settings: accepted, rewritten with a note, or refused with their replacement.

Words in, words and notes out. A word that the command itself knows is never looked up here.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CRITIC_COMMANDS = ("ppo",)


class Refused(ValueError):
    """A foreign word that has no meaning here, or another one; the message names the replacement."""


@dataclass(frozen=True, slots=True)
class Call:
    """The command that a foreign word was given to, with its other words: `values` has those of each flag."""

    command: str
    values: Mapping[str, list[str]]

    def value(self, *names: str) -> str | None:
        """The first value of the first of these flags that is given."""
        return next((self.values[name][0] for name in names if self.values.get(name)), None)


Settings = dict[str, list[str]]
"""Settings of this program by name, each with its words; no words for a switch."""
Meaning = Callable[[list[str], Call], Settings | None]
"""The meaning of a foreign word with its values: settings of this program, None if nothing has to be set."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A foreign word: how many values it takes (None: all up to the next flag), and its meaning."""

    takes: int | None
    meaning: Meaning


@dataclass(slots=True)
class Translation:
    """Words that this program knows, with notes about the others."""

    words: list[str] = field(default_factory=list)
    not_needed: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        listed = [f"not needed here: {', '.join(self.not_needed)}"] if self.not_needed else []
        return [*listed, *self.rewritten]


def _not_needed(values: list[str], call: Call) -> None:
    return None


def _only(*allowed: float, instead: str) -> Meaning:
    """A word that has nothing to do at these values, and no counterpart at others."""

    def meaning(values: list[str], call: Call) -> None:
        try:
            fits = float(values[0]) in allowed
        except (ValueError, IndexError):
            fits = False
        if not fits:
            raise Refused(instead)

    return meaning


def _renamed(name: str) -> Meaning:
    return lambda values, call: {name: values}


def _as(settings: Settings) -> Meaning:
    return lambda values, call: settings


def _mapped(name: str, values_of: Mapping[str, str]) -> Meaning:
    def meaning(values: list[str], call: Call) -> Settings:
        value = values[0] if values else ""
        if value not in values_of:
            raise Refused(f"{value!r} is not one of {', '.join(values_of)}")
        return {name: [values_of[value]]}

    return meaning


def _refused(sentence: str) -> Meaning:
    def meaning(values: list[str], call: Call) -> None:
        raise Refused(sentence)

    return meaning


def _prompt_max_len(values: list[str], call: Call) -> Settings:
    """OpenRLHF bounds the prompt; here `max_len` bounds prompt and response together."""
    response = call.value("max_new_tokens", "generate_max_len") or "1024"
    if not (values and values[0].isdigit() and response.isdigit()):
        raise Refused("give --max_len, the longest prompt and response together")
    return {"max_len": [str(int(values[0]) + int(response))]}


ESTIMATORS: dict[str, tuple[str, Settings, str]] = {
    "gae": ("ppo", {}, "rlhf ppo"),
    "reinforce": ("reinforce++", {}, "rlhf reinforce++"),
    "reinforce_baseline": ("reinforce++", {"baseline": ["group"]}, "rlhf reinforce++ --baseline group"),
    "group_norm": ("grpo", {}, "rlhf grpo"),
    "dr_grpo": ("grpo", {"preset": ["dr_grpo"]}, "rlhf grpo --preset dr_grpo"),
    "rloo": ("rloo", {}, "rlhf rloo"),
}


def _estimator(values: list[str], call: Call) -> Settings | None:
    """The estimator is the command here; a value that agrees with the command is accepted."""
    value = values[0] if values else ""
    if value not in ESTIMATORS:
        raise Refused("the estimator is the command: rlhf ppo, reinforce++, grpo, rloo or remax")
    command, settings, instead = ESTIMATORS[value]
    if command != call.command:
        raise Refused(f"the estimator {value} is a command here: {instead}")
    return settings or None


def _correction_threshold(values: list[str], call: Call) -> Settings:
    """OpenRLHF's bounds: the upper one caps token_clip, both of them bound the kept ratios of the masks."""
    masks = call.value("vllm_is_correction_type") in ("icepop", "seq-mask-tis")
    if masks and len(values) == 2:
        return {"rollout_correction_range": values}
    return {"rollout_correction_cap": values[-1:]}


def _without_critic(values: list[str], call: Call) -> None:
    if call.command in CRITIC_COMMANDS:
        raise Refused("no setting of this program has this name")


CORRECTIONS = {"tis": "token_clip", "icepop": "token_mask", "seq-mask-tis": "seq_mask"}

SWITCHES_NOT_NEEDED = (
    "packing_samples", "use_dynamic_batch", "multiturn", "actor_init_on_gpu", "perf", "compute_fp32_loss",
    "disable_fast_tokenizer", "gradient_checkpointing_use_reentrant", "vllm_sync_with_ray", "flash_attn",
)  # fmt: skip
"""Switches whose work this program does always or by itself."""
VALUES_NOT_NEEDED = ("micro_rollout_batch_size", "rollout_max_tokens_per_gpu", "ptx_coef", "dataloader_num_workers")
"""Settings with a value that this program finds by itself, or has no use for."""
CRITIC_WORDS = ("critic_pretrain", "critic_learning_rate", "critic_num_nodes", "critic_num_gpus_per_node", "value_clip")

FLAT = "settings are flat here, without sections: docs/coming-from.md lists the names"

PENALTY = (
    "training takes no penalty, because the trainer's log-probabilities would differ from the sampler's; rlhf generate "
    "and rlhf eval have the setting, and --reward_funcs repetition_penalty punishes repetition while training"
)

TABLE: dict[str, Foreign] = {
    **{name: Foreign(0, _not_needed) for name in SWITCHES_NOT_NEEDED},
    **{name: Foreign(1, _not_needed) for name in VALUES_NOT_NEEDED},
    **{name: Foreign(1, _without_critic) for name in CRITIC_WORDS},
    "bf16": Foreign(0, _as({"param_dtype": ["bf16"]})),
    "ring_attn_size": Foreign(1, _only(1, instead="several ranks for one sequence are not there yet; drop it")),
    "ring_head_stride": Foreign(1, _only(1, instead="several ranks for one sequence are not there yet; drop it")),
    "ds_tensor_parallel_size": Foreign(1, _only(1, instead="trainers use ZeRO: --zero_stage 3 partitions weights")),
    "max_images_per_prompt": Foreign(1, _only(0, instead="images are not there yet")),
    "gamma": Foreign(1, _only(1, instead="this command compares whole responses; rlhf ppo discounts")),
    "lambd": Foreign(1, _only(1, instead="this command has no critic; rlhf ppo has --lambd")),
    "freezing_actor_steps": Foreign(1, _only(-1, 0, instead="this command has no critic to warm up; rlhf ppo has one")),
    "repetition_penalty": Foreign(1, _only(1, instead=PENALTY)),
    "generate_max_len": Foreign(1, _renamed("max_new_tokens")),
    "prompt_max_len": Foreign(1, _prompt_max_len),
    "prompt_key": Foreign(1, _renamed("input_key")),
    "train_split": Foreign(1, _renamed("dataset_split")),
    "ipo": Foreign(0, _as({"loss": ["ipo"]})),
    "policy_loss_type": Foreign(1, _mapped("policy_loss", {"ppo": "clip", "gspo": "gspo"})),
    "enable_vllm_is_correction": Foreign(0, _not_needed),
    "vllm_is_correction_type": Foreign(1, _mapped("rollout_correction", CORRECTIONS)),
    "vllm_is_truncated_threshold": Foreign(None, _correction_threshold),
    "advantage_estimator": Foreign(1, _estimator),
    "model_name_or_path": Foreign(1, _refused("give --pretrain")),
    "dataset_name": Foreign(1, _refused("give --dataset, or --prompt_data for commands that sample")),
    "output_dir": Foreign(1, _refused("give --output")),
    "num_generations": Foreign(1, _refused("give --n_samples_per_prompt")),
    "max_completion_length": Foreign(1, _refused("give --max_new_tokens")),
    "max_prompt_length": Foreign(1, _refused("give --max_len, the longest prompt and response together")),
    "per_device_train_batch_size": Foreign(1, _refused("give --micro_train_batch_size")),
    "gradient_accumulation_steps": Foreign(1, _refused("give --train_batch_size, the responses of an optimizer step")),
    "num_train_epochs": Foreign(1, _refused("give --max_epochs")),
    "max_seq_length": Foreign(1, _refused("give --max_len")),
    "max_length": Foreign(1, _refused("give --max_len")),
    "beta": Foreign(1, _refused("the weight of the KL divergence is --init_kl_coef")),
    "agent_func_path": Foreign(1, _refused("episodes of several turns are not there yet")),
    "async_train": Foreign(0, _refused("training beside generation is not there yet")),
    "pretrain_data": Foreign(1, _refused("a second loss on pre-training data is not there")),
    **{
        section: Foreign(None, _refused(FLAT))
        for section in ("data", "worker", "trainer", "algorithm", "actor_rollout_ref", "critic", "reward_model")
    },
}

COMMANDS = {
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo, reinforce++, grpo, rloo or remax",
    "lora_combiner": "merge",
    "batch_inference": "generate",
    "serve_rm": "serve-rm",
    "reward": "rm",
    "vllm-serve": "generate, which starts its own engines",
    "env": "doctor",
    "interactive_chat": "generate; there is no chat",
    "chat": "generate; there is no chat",
}
"""Commands of other tools, with their names here."""


def translate(words: Sequence[str], *, command: str, known: Mapping[str, int]) -> Translation:
    """Replace the foreign flags among a command's words.

    Args:
        known: flags of the command itself, each with the number of values that it takes.
    """
    call, done = Call(command, _values_by_flag(words)), Translation()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        foreign = _foreign(name, known) if word.startswith("--") else None
        if foreign is not None:
            _apply(name, foreign, [inline] if equals else _take(rest, foreign.takes), call, done)
        elif not (word.startswith("--") and not equals and name in OWN_FORMS and OWN_FORMS[name](rest, done)):
            done.words.append(word)
    _model_without_output(done, known)
    _template_without_chat(done, known)
    return done


def translate_settings(
    values: Mapping[str, Any], *, command: str, known: Mapping[str, int]
) -> tuple[dict[str, Any], Translation]:
    """Replace the foreign names among the settings of a YAML file."""
    listed = {name: _listed(value) for name, value in values.items()}
    call, own = Call(command, listed), {}
    done = Translation()
    for name, value in values.items():
        foreign = _foreign(name, known)
        if name == "use_wandb" and isinstance(value, str) and value.lower() not in ("true", "false", "null"):
            _wandb_key([value], done)
        elif foreign is None:
            own[name] = value
        elif value is not False:  # a switch of another tool that is off
            _apply(name, foreign, [] if value is True else listed[name], call, done)
    for name, words in _values_by_flag(done.words).items():
        own.setdefault(name, words[0] if len(words) == 1 else words or True)
    return own, done


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _foreign(name: str, known: Mapping[str, int]) -> Foreign | None:
    section = name.partition(".")[0]
    return None if name in known or name.removeprefix("no_") in known else TABLE.get(name) or TABLE.get(section)


def _take(rest: list[str], count: int | None) -> list[str]:
    """Take the values of a flag off the words that follow it."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (count is None or len(values) < count):
        values.append(rest.pop(0))
    return values


def _apply(name: str, foreign: Foreign, values: list[str], call: Call, done: Translation) -> None:
    written = " ".join([f"--{name}", *values])
    try:
        settings = foreign.meaning(values, call)
    except Refused as refusal:
        done.problems.append(f"--{name}: {refusal}")
        return
    if settings is None:
        done.not_needed.append(written)
        return
    words = [word for setting, own in settings.items() for word in (f"--{setting}", *own)]
    done.words += words
    done.rewritten.append(f"{written} is {' '.join(words)} here")


WANDB_KEY = "WANDB_API_KEY"


def _wandb_key(rest: list[str], done: Translation) -> bool:
    """Put a key of W&B into the environment alone: command lines are shown and kept."""
    if not rest or rest[0].startswith("-"):
        return False
    os.environ[WANDB_KEY] = rest.pop(0)
    done.rewritten.append(f"the key after --use_wandb is taken as {WANDB_KEY}; export it instead of writing it down")
    done.words.append("--use_wandb")
    return True


def _tensorboard_folder(rest: list[str], done: Translation) -> bool:
    if not rest or rest[0].startswith("-"):
        return False
    done.rewritten.append(f"TensorBoard's files go to the output, not to {rest.pop(0)}")
    done.words.append("--use_tensorboard")
    return True


def _modules(rest: list[str], done: Translation) -> bool:
    done.words += ["--target_modules", ",".join(_take(rest, None))]
    return True


def _reward_file(rest: list[str], done: Translation) -> bool:
    if not rest or not rest[0].endswith(".py"):
        return False
    file = rest.pop(0)
    done.rewritten.append(f"--remote_rm_url {file} is --reward_func {file} here")
    done.words += ["--reward_func", file]
    return True


OWN_FORMS: dict[str, Callable[[list[str], Translation], bool]] = {
    "use_wandb": _wandb_key,
    "use_tensorboard": _tensorboard_folder,
    "target_modules": _modules,
    "remote_rm_url": _reward_file,
}
"""Flags of this program that have another form elsewhere: each takes that form off the words, or leaves them."""


def _values_by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, inline = word.removeprefix("--").partition("=")
            values = found.setdefault(name.replace("-", "_"), [])
            values += [inline] if equals else []
        else:
            values.append(word)
    return found


def _model_without_output(done: Translation, known: Mapping[str, int]) -> None:
    """Give a run that names its model alone, as OpenRLHF's, a folder beside the model for its other files."""
    given = _values_by_flag(done.words)
    if {"output", "save_path"} <= known.keys() and "output" not in given and "config" not in given:
        path = next(iter(given.get("save_path", [])), None)
        if path:
            done.words += ["--output", f"{path.rstrip('/')}_run"]
            done.rewritten.append(f"the model goes to {path}, all other files of the run to {path.rstrip('/')}_run")


def _template_without_chat(done: Translation, known: Mapping[str, int]) -> None:
    """OpenRLHF uses a chat template only on request; an `input_template` alone means plain text."""
    given = _values_by_flag(done.words).keys()
    decided = given & {"apply_chat_template", "no_apply_chat_template", "config"}
    if "apply_chat_template" in known and "input_template" in given and not decided:
        done.words.append("--no_apply_chat_template")
        done.rewritten.append("--input_template takes the place of the chat template: --no_apply_chat_template")
