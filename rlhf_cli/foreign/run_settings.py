"""Translates rewards, data, evaluation, trackers and checkpoints from other frameworks."""

import json

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.foreign.call import Call, Refused, Settings, integer


def verl_reward(values: list[str], call: Call) -> Settings:
    """Translate the reward in verl and EasyR1: a function in a file, a reward model, or a verifier per row."""
    if path := call.value("worker.reward.reward_function"):
        return {"reward_func": [path]}
    if path := call.value("reward.custom_reward_function.path", "custom_reward_function.path"):
        name = call.value("reward.custom_reward_function.name", "custom_reward_function.name") or "compute_score"
        return {"reward_func": [f"{path}:{name}"]}
    if call.is_on("reward.reward_model.enable", "reward_model.enable"):
        model = call.value("reward.reward_model.model_path", "reward_model.model.path")
        if model is None:
            raise Refused("use --reward_pretrain, the reward model")
        return {"reward_pretrain": [model]}
    return {"reward_funcs": ["by_row"]}


def _arguments(call: Call, *sections: str) -> list[str]:
    """Join the settings in a section of arguments to a JSON object."""
    import yaml  # `rlhf --help` needs none

    found = {
        name.removeprefix(f"{section}."): yaml.safe_load(words[0]) if words else True
        for section in sections
        for name, words in call.values.items()
        if name.startswith(f"{section}.")
    }
    return [json.dumps(found)]


def reward_arguments(values: list[str], call: Call) -> Settings:
    """Translate the arguments of a reward function in verl and EasyR1."""
    own = "custom_reward_function.reward_kwargs"
    return {"reward_func_args": _arguments(call, own, f"reward.{own}", "worker.reward.reward_function_kwargs")}


def template_arguments(values: list[str], call: Call) -> Settings:
    """Translate the arguments of the chat template in verl."""
    return {"chat_template_kwargs": _arguments(call, "data.apply_chat_template_kwargs")}


def template_path(values: list[str], call: Call) -> Settings:
    """Translate a chat template in TRL: a file, or a tokenizer that contains one."""
    if not values[0].endswith((".jinja", ".jinja2")):
        raise Refused("save the template of that tokenizer as a file for --tokenizer_chat_template")
    return {"tokenizer_chat_template": values}


def evaluated_rows(values: list[str], call: Call) -> Settings | None:
    """Translate the number of rows to evaluate in verl; -1 means all."""
    return None if values[0].startswith("-") else {"eval_max_samples": values}


def critic_clip(values: list[str], call: Call) -> None:
    """Accept the critic's gradient clipping if it equals the actor's."""
    actor = call.value("actor_rollout_ref.actor.grad_clip", "worker.actor.max_grad_norm") or "1.0"
    if call.command == "ppo" and float(values[0]) != float(actor):
        raise Refused("actor and critic share --max_norm")


def reward_manager(values: list[str], call: Call) -> None:
    """Accept reward managers that only call the reward function."""
    if values[0] not in ("naive", "dapo", "prime", "batch"):
        raise Refused("this way to call rewards does not exist here; --reward_func accepts functions of verl")


def evaluation(values: list[str], call: Call) -> Settings | None:
    """Translate evaluation in verl and EasyR1, which requires evaluation data."""
    if not call.value("data.val_files"):
        return None
    rollout, easy = "actor_rollout_ref.rollout.", "worker.rollout.val_override_config."
    settings: Settings = {}
    if frequency := call.value("trainer.test_freq", "trainer.val_freq"):
        settings["eval_steps"] = [frequency if integer(frequency, "trainer.test_freq") > 0 else "-1"]
    temperature = call.value(f"{rollout}val_kwargs.temperature", f"{rollout}val_temperature", f"{easy}temperature")
    is_greedy = (call.value(f"{rollout}val_kwargs.do_sample") or "true").lower() == "false"
    if temperature is not None and not is_greedy:
        settings["eval_temperature"] = [temperature]
    count = call.value(f"{rollout}val_kwargs.n", f"{rollout}n_val", f"{easy}n")
    if count is not None and "eval_temperature" in settings and float(settings["eval_temperature"][0]) > 0:
        settings["eval_n_samples_per_prompt"] = [count]
    return settings or None


def joined_data(values: list[str], call: Call) -> Settings:
    """Join training files with commas."""
    return {"prompt_data" if call.command in ONLINE_TRAINING else "dataset": [",".join(values)]}


def joined_evaluation(values: list[str], call: Call) -> Settings:
    """Join evaluation files with commas."""
    return {"eval_dataset": [",".join(values)]}


def prompt_column(values: list[str], call: Call) -> Settings:
    """Translate the prompt column, unless it is a nested key."""
    if call.values.get("data.prompt_dict_keys"):
        raise Refused("a key inside of a column is not read; convert rows with --data_format FILE.py:NAME")
    return {"input_key": values}


def output_column(values: list[str], call: Call) -> Settings | None:
    """Translate the response column in verl, unless it is a nested key."""
    if call.values.get("data.response_dict_keys"):
        raise Refused("a key inside of a column is not read; convert rows with --data_format FILE.py:NAME")
    return {"output_key": values}


_TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "trackio")


def loggers(values: list[str], call: Call) -> Settings | None:
    """Translate trackers in verl and EasyR1. Console output and log files are always written."""
    settings: Settings = {f"use_{name}": [] for name in _TRACKERS if name in values}
    if others := [name for name in values if name not in (*_TRACKERS, "console", "file")]:
        raise Refused(f"no tracker for {', '.join(others)}; --tracker accepts your own class")
    return settings or None


def wandb_project(values: list[str], call: Call) -> Settings:
    """Translate the Weights & Biases project, which also enables logging in prime-rl."""
    return {"use_wandb": [], "wandb_project": values}


def kept_checkpoints(values: list[str], call: Call) -> Settings | None:
    """Translate the number of checkpoints to keep; -1 means unlimited."""
    if values[0] in ("-1", "null"):
        raise Refused("there is always a limit: --max_ckpt_num, 3 by default")
    return {"max_ckpt_num": values}


def filtered_rounds(values: list[str], call: Call) -> Settings | None:
    """Translate the maximum rounds per iteration in DAPO; 0 means unlimited."""
    if not call.is_on("algorithm.filter_groups.enable"):
        return None
    if integer(values[0], "max_num_gen_batches") <= 0:
        raise Refused("there is always a limit: --dynamic_max_rounds, 8 by default")
    return {"dynamic_max_rounds": values}


def critic_rate(values: list[str], call: Call) -> Settings | None:
    """Translate the critic learning rate, if the command has a critic."""
    return {"critic_learning_rate": values} if call.command == "ppo" else None


def value_clip(values: list[str], call: Call) -> Settings | None:
    """Translate the value clip range, if the command has a critic."""
    return {"value_clip": values} if call.command == "ppo" else None


def critic_model(values: list[str], call: Call) -> Settings | None:
    """Translate the critic model, if the command has a critic."""
    return {"critic_pretrain": values} if call.command == "ppo" else None


def critic_warmup(values: list[str], call: Call) -> Settings | None:
    """Translate the iterations for critic warm-up."""
    return {"freezing_actor_steps": values} if call.command == "ppo" and values != ["0"] else None


def discount(values: list[str], call: Call) -> Settings | None:
    """Translate the discount, if it is not 1."""
    return {"gamma": values} if float(values[0]) != 1 else None


def gae_lambda(values: list[str], call: Call) -> Settings | None:
    """Translate GAE lambda, if the command has a critic."""
    return {"lambd": values} if call.command == "ppo" and float(values[0]) != 1 else None


def verl_std(values: list[str], call: Call) -> Settings | None:
    """Translate whether GRPO divides by the standard deviation."""
    is_off = values[0].lower() == "false"
    return {"advantage_std": ["none"]} if is_off and call.command == "grpo" else None


def verl_correction(values: list[str], call: Call) -> Settings:
    """Translate the correction for the mismatch between engine and trainer in verl, off by default."""
    section = "algorithm.rollout_correction."
    mode, cap = call.value(f"{section}rollout_is"), call.value(f"{section}rollout_is_threshold") or "2.0"
    if (ratio := call.value("actor_rollout_ref.actor.tis_imp_ratio_cap")) is not None and float(ratio) > 0:
        mode, cap = "token", ratio
    if mode in (None, "null", "None"):
        return {"rollout_correction": ["off"]}
    if mode != "token":
        raise Refused("no ratio of whole sequences as a product; --rollout_correction has token_clip and more")
    return {"rollout_correction": ["token_clip"], "rollout_correction_cap": [cap]}


def prime_teacher(values: list[str], call: Call) -> Settings:
    """Translate the teacher for on-policy distillation in prime-rl."""
    call.note("the teacher is loaded as a part of the run, without a server")
    return {"teacher_pretrain": values}


def prime_staleness(values: list[str], call: Call) -> Settings | None:
    """Translate the number of steps that prime-rl samples ahead."""
    return None if values == ["0"] else {"async_train": [], "max_staleness": values}


def prime_betas(values: list[str], call: Call) -> Settings:
    """Join the two AdamW decay rates in prime-rl, 0.9 and 0.999 by default."""
    first = call.value("trainer.optim.betas1", "optim.betas1") or "0.9"
    return {"adam_betas": [first, call.value("trainer.optim.betas2", "optim.betas2") or "0.999"]}


def prime_model(values: list[str], call: Call) -> Settings | None:
    """Translate the model for a single component in prime-rl, unless a shared model is set."""
    return None if "model.name" in call.values else {"pretrain": values}


def lora_alpha(values: list[str], call: Call) -> Settings:
    """Translate LoRA alpha to an integer."""
    return {"lora_alpha": [str(integer(values[0], "lora_alpha"))]}
