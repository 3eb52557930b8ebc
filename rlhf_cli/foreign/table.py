"""Translation table for flags from other frameworks.

Each flag maps to `rlhf` settings, to nothing (not needed), or to an error that names the replacement. Flags that the
command supports under the same name are never translated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_cli.command_table import COMMANDS, ONLINE_TRAINING, POLICY_GRADIENT, TRAINING
from rlhf_cli.errors import listed


class Refused(ValueError):
    """A foreign flag without an equivalent. The message names the replacement."""


@dataclass(frozen=True, slots=True)
class Call:
    """The command line that contains a foreign flag. `values` holds the values for each flag."""

    command: str
    values: Mapping[str, list[str]]

    def value(self, *names: str) -> str | None:
        """Return the first value given for any of these flags, in this order."""
        return next((self.values[name][0] for name in names if self.values.get(name)), None)


Settings = dict[str, list[str]]
"""`rlhf` settings: values by name; an empty list for a switch."""
Meaning = Callable[[list[str], Call], Settings | None]
"""Translates a foreign flag's values to settings, or to None if the flag is not needed."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A foreign flag with the number of values, `takes`; None consumes all up to the next flag."""

    takes: int | None
    meaning: Meaning


def _not_needed(values: list[str], call: Call) -> None:
    return None


def _only(*allowed: float, instead: str) -> Meaning:
    """Ignore a number that equals a fixed behavior; reject other numbers."""

    def meaning(values: list[str], call: Call) -> None:
        try:
            fits = float(values[0]) in allowed
        except (ValueError, IndexError):
            fits = False
        if not fits:
            raise Refused(instead)

    return meaning


def _one_of(*allowed: str, instead: str) -> Meaning:
    """Ignore a value that equals a fixed behavior; reject other values."""

    def meaning(values: list[str], call: Call) -> None:
        if values[:1] and values[0] not in allowed:
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
    """OpenRLHF limits the prompt; `max_len` limits prompt plus response."""
    if "max_len" in call.values:
        raise Refused("--max_len is set too and limits prompt plus response; drop --prompt_max_len")
    # 1024 is OpenRLHF's default for the response.
    response = call.value("max_new_tokens", "generate_max_len") or "1024"
    if not (values and values[0].isdigit() and response.isdigit()):
        raise Refused("use --max_len, the limit for prompt plus response")
    return {"max_len": [str(int(values[0]) + int(response))]}


OWN_AND_FOREIGN = ("advantage_estimator",)
"""Flags that accept external code in `rlhf` and names in other frameworks."""

FOREIGN_ESTIMATORS: dict[str, tuple[str, Settings]] = {
    "gae": ("ppo", {}),
    "reinforce": ("reinforce++", {}),
    "reinforce_baseline": ("reinforce++", {"baseline": ["group"]}),
    "group_norm": ("grpo", {}),
    "dr_grpo": ("grpo", {"preset": ["dr_grpo"]}),
    "rloo": ("rloo", {}),
}


def _estimator(values: list[str], call: Call) -> Settings | None:
    """Accept an estimator that matches the command, since the command selects the estimator."""
    # Imported here: plugins.py imports pydantic, which `rlhf --help` does not need.
    from rlhf_cli.config.plugins import is_target

    value = values[0] if values else ""
    if is_target(value):
        return {"advantage_estimator": values}
    if value not in FOREIGN_ESTIMATORS:
        raise Refused(f"the command selects the estimator: rlhf {listed(POLICY_GRADIENT, 'or')}")
    command, settings = FOREIGN_ESTIMATORS[value]
    if command != call.command:
        flags = "".join(f" --{name} {' '.join(words)}" for name, words in settings.items())
        raise Refused(f"the command selects the estimator; for {value}, run rlhf {command}{flags}")
    return settings or None


def _correction_threshold(values: list[str], call: Call) -> Settings:
    """Translate OpenRLHF's bounds: token_clip uses the upper one as cap, masks keep ratios between both."""
    masks = call.value("vllm_is_correction_type") in ("icepop", "seq-mask-tis") or "use_icepop" in call.values
    if masks and len(values) == 2:
        return {"rollout_correction_range": values}
    return {"rollout_correction_cap": values[-1:]}


def _lora_target(values: list[str], call: Call) -> Settings:
    """Translate LLaMA-Factory's adapter targets, where `all` means all linear layers."""
    return {"target_modules": ["all-linear" if values == ["all"] else ",".join(values)]}


def _post_processor(values: list[str], call: Call) -> Settings:
    if values[:1] == ["rs"]:
        return {"select": ["best"]}
    raise Refused("only rs is supported (the best response per prompt): use --select best")


def _frozen_offload(values: list[str], call: Call) -> Settings | None:
    """Translate to --ref_offload, the one setting for all frozen models. It may be set already."""
    return None if "ref_offload" in call.values else {"ref_offload": []}


def _muon_lr(values: list[str], call: Call) -> None:
    """Reject a separate learning rate for Muon. Without --optim muon, OpenRLHF ignores the flag too."""
    if call.value("optim") == "muon":
        raise Refused("--optim muon scales updates to AdamW's size: use one learning rate for both")


def _without_critic(values: list[str], call: Call) -> None:
    from rlhf_cli.algorithms.estimators.table import ESTIMATORS  # `rlhf --help` needs no pydantic

    row = ESTIMATORS.get(COMMANDS[call.command].estimator) if call.command in COMMANDS else None
    if row is not None and row.critic:
        raise Refused("there is no setting with this name")


def _by_kind(*, online: str, offline: str) -> Meaning:
    """Rename a flag, depending on whether the command samples."""
    return lambda values, call: {online if call.command in SAMPLING else offline: values}


def _epochs(values: list[str], call: Call) -> Settings:
    """Translate TRL's epochs, which may be written as `3.0`, to whole numbers."""
    whole = [value.removesuffix(".0") for value in values]
    return {"num_episodes" if call.command in SAMPLING else "max_epochs": whole}


TRACKERS: dict[str, Settings] = {
    "none": {"no_use_tensorboard": []},
    "tensorboard": {"use_tensorboard": []},
    "wandb": {"use_wandb": []},
    "all": {"use_tensorboard": [], "use_wandb": []},
}


def _report_to(values: list[str], call: Call) -> Settings:
    settings: Settings = {}
    for value in values:
        if value not in TRACKERS:
            raise Refused("use --use_wandb or --use_tensorboard, or --tracker with your own code")
        settings |= TRACKERS[value]
    return settings


def _peft(values: list[str], call: Call) -> None:
    is_off = bool(values) and values[0].lower() == "false"
    if not is_off and not {"lora_r", "lora_rank"} & call.values.keys():
        raise Refused("use --lora_rank; a rank above 0 trains an adapter")


def _vllm(values: list[str], call: Call) -> Settings:
    is_off = bool(values) and values[0].lower() == "false"
    return {"rollout_backend": ["transformers" if is_off else "vllm"]}


CORRECTIONS = {"tis": "token_clip", "icepop": "token_mask", "seq-mask-tis": "seq_mask"}

SWITCHES_NOT_NEEDED = (
    "packing_samples", "use_dynamic_batch", "multiturn", "actor_init_on_gpu", "perf", "compute_fp32_loss",
    "disable_fast_tokenizer", "gradient_checkpointing_use_reentrant", "vllm_sync_with_ray", "flash_attn",
    "save_hf_ckpt", "save_value_network", "use_ds_universal_ckpt",
)  # fmt: skip
"""Switches for behavior that is automatic or cannot be disabled. Checkpoints load on any number of ranks, and in `rlhf
merge`."""
VALUES_NOT_NEEDED = ("micro_rollout_batch_size", "rollout_max_tokens_per_gpu", "ptx_coef", "dataloader_num_workers")
"""Flags with values that are determined automatically or not used."""
CRITIC_WORDS = ("critic_pretrain", "critic_learning_rate", "critic_num_nodes", "critic_num_gpus_per_node", "value_clip")

SAMPLING = (*ONLINE_TRAINING, "generate", "eval")
"""Commands that read prompts and sample."""
SECTIONS = (
    "data",
    "worker",
    "trainer",
    "algorithm",
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "distillation",
)
"""Sections in verl's and EasyR1's settings."""
FLAT = "settings are flat, without sections; docs/coming-from.md lists the names"

PENALTY = (
    "not supported in training, because log-probs from the trainer and the engine would differ; rlhf generate and rlhf "
    "eval support it, and --reward_funcs repetition_penalty penalizes repetition in training"
)

NO_IMAGES = "this command does not support images"
AN_AGENT = "write a class with step(text) or tools in --environment FILE.py; docs/coming-from.md has an example"
NO_LAG = f"only {listed(POLICY_GRADIENT)} support asynchronous sampling"
SHARED = "actor and critic share --lr_scheduler, --lr_warmup_ratio, --min_lr_ratio, --max_norm and --l2"
SHARED_WORDS = (
    "optim",
    "adam_betas",
    "adam_eps",
    "l2",
    "lr_scheduler",
    "lr_warmup_ratio",
    "min_lr_ratio",
    "max_norm",
)
OPENRLHF = {
    "no_advantage_std_norm": Foreign(0, _refused("use rlhf grpo --preset dr_grpo, which does not divide by the std")),
    "disable_ds_ckpt": Foreign(0, _refused("use --save_steps -1: no checkpoints, only the final model is saved")),
    "full_determinism": Foreign(0, _refused("--seed fixes the run; deterministic GPU kernels are not supported yet")),
    "deepcompile": Foreign(0, _refused("use --compile_model")),
    "ref_reward_offload": Foreign(0, _frozen_offload),
    "value_head_prefix": Foreign(1, _one_of("score", instead="the head is always named score, as in transformers")),
    "max_ckpt_mem": Foreign(1, _only(1e8, instead="use --max_ckpt_num")),
    "use_ms": Foreign(0, _refused("models and data are loaded from folders or the Hugging Face Hub")),
    "image_key": Foreign(1, _refused(NO_IMAGES)),
    "freeze_visual_encoder": Foreign(0, _as({"freeze_vision_tower": []})),
    "async_queue_size": Foreign(1, _renamed("max_staleness")),
    "vllm_generate_batch_size": Foreign(1, _refused("use --dynamic_oversample, which samples extra prompts")),
    "vllm_enable_is_correction": Foreign(0, _not_needed),
    "use_icepop": Foreign(0, _as({"rollout_correction": ["token_mask"]})),
    "load_in_4bit": Foreign(0, _refused("only training commands support 4-bit weights")),
    "experts_implementation": Foreign(1, _not_needed),
    "muon_lr": Foreign(1, _muon_lr),
    "muon_momentum": Foreign(1, _only(0.95, instead="--optim muon uses momentum 0.95")),
    "muon_ns_steps": Foreign(1, _only(5, instead="--optim muon uses 5 Newton-Schulz steps")),
    "muon_nesterov": Foreign(0, _not_needed),
    "muon_no_nesterov": Foreign(0, _refused("--optim muon always uses Nesterov momentum")),
    **{f"critic_{name}": Foreign(None, _refused(SHARED)) for name in SHARED_WORDS},
}
"""OpenRLHF flags that need more than a new name."""

TRL = {
    "num_iterations": Foreign(1, _renamed("max_epochs")),
    "epsilon": Foreign(1, _renamed("eps_clip")),
    "epsilon_high": Foreign(1, _refused("use --eps_clip_low_high LOW HIGH")),
    "loss_type": Foreign(1, _refused("use --loss, or --policy_loss and --loss_agg for online commands")),
    "scale_rewards": Foreign(None, _refused("rlhf grpo divides by the std, --preset dr_grpo does not")),
    "use_vllm": Foreign(None, _vllm),
    "vllm_mode": Foreign(1, _refused("use --colocate_all_models to run engines on the training GPUs")),
    "warmup_ratio": Foreign(1, _renamed("lr_warmup_ratio")),
    "zero_hpz_partition_size": Foreign(1, _renamed("zpg")),
    "optimizer_offload": Foreign(None, _refused("use --adam_offload")),
    "enable_activation_offload": Foreign(0, _as({"activation_offload": []})),
    "adam_epsilon": Foreign(1, _renamed("adam_eps")),
    "adam_beta1": Foreign(1, _refused("use --adam_betas BETA1 BETA2")),
    "adam_beta2": Foreign(1, _refused("use --adam_betas BETA1 BETA2")),
    "lr_scheduler_type": Foreign(1, _renamed("lr_scheduler")),
    "weight_decay": Foreign(1, _renamed("l2")),
    "report_to": Foreign(None, _report_to),
    "use_peft": Foreign(None, _peft),
    "lora_r": Foreign(1, _renamed("lora_rank")),
    "lora_target_modules": Foreign(None, lambda values, call: {"target_modules": [",".join(values)]}),
    "lora_modules_to_save": Foreign(None, _refused("adapters train only linear layers and a reward model's head")),
    "lora_task_type": Foreign(1, _not_needed),
    "use_bnb_nested_quant": Foreign(None, _not_needed),
    "bnb_4bit_quant_type": Foreign(1, _one_of("nf4", instead="4-bit weights are always NF4")),
    "load_in_8bit": Foreign(None, _refused("the base model uses 16 bits, or 4 bits with --load_in_4bit")),
    "max_steps": Foreign(1, _refused("use --max_iterations")),
    "overwrite_output_dir": Foreign(0, _as({"overwrite": []})),
    "push_to_hub": Foreign(0, _refused("uploads are not supported; the model is in the output folder")),
    "fp16": Foreign(0, _refused("use --param_dtype bf16 or fp32")),
    "run_name": Foreign(1, _renamed("wandb_run_name")),
    "remove_unused_columns": Foreign(None, _not_needed),
    "logging_first_step": Foreign(None, _not_needed),
    "eval_strategy": Foreign(1, _one_of("steps", "no", instead="use --eval_steps, in steps")),
    "save_strategy": Foreign(1, _one_of("steps", instead="use --save_steps, in steps; -1 writes no checkpoints")),
    "torch_dtype": Foreign(1, _mapped("param_dtype", {"bfloat16": "bf16", "float32": "fp32"})),
    "dtype": Foreign(1, _mapped("param_dtype", {"bfloat16": "bf16", "float32": "fp32"})),
    "packing": Foreign(None, _not_needed),
    "assistant_only_loss": Foreign(
        None, _one_of("true", "True", instead="the loss covers assistant tokens; for all tokens, use --pretrain_mode")
    ),
    "learning_rate": Foreign(1, _renamed("actor_learning_rate")),
    "teacher_model_name_or_path": Foreign(1, _renamed("teacher_pretrain")),
}
"""TRL flags that need more than a new name."""

LLAMA_FACTORY = {
    "finetuning_type": Foreign(1, _one_of("full", instead="use --lora_rank; a rank above 0 trains an adapter")),
    "lora_target": Foreign(1, _lora_target),
    "additional_target": Foreign(1, _refused("adapters train only linear layers and a reward model's head")),
    "adapter_name_or_path": Foreign(1, _refused("pass the adapter folder as --pretrain; it names the base model")),
    "quantization_bit": Foreign(1, _one_of("none", instead="use --load_in_4bit")),
    "pissa_init": Foreign(None, _refused("not supported: adapters are initialized to zero")),
    "loraplus_lr_ratio": Foreign(1, _refused("not supported: both LoRA factors use the same learning rate")),
}
"""LLaMA-Factory flags for adapters."""

SLIME = {
    "use_opd": Foreign(0, _not_needed),
    "opd_type": Foreign(1, _one_of("megatron", instead="use --teacher_pretrain MODEL; the teacher is part of the run")),
    "opd_kl_coef": Foreign(1, _renamed("distill_coef")),
    "opd_teacher_load": Foreign(1, _renamed("teacher_pretrain")),
}
"""slime flags for on-policy distillation."""

EASYR1 = {"data.format_prompt": Foreign(1, _renamed("format_prompt"))}
"""EasyR1 flags for prompts."""

SHARED_ELSEWHERE = "only training commands support sequence parallelism; drop it"
SPLIT_ELSEWHERE = "only training commands support tensor parallelism; drop it"
SPLIT_LAYERS = {
    name: Foreign(1, _renamed("tensor_parallel_size"))
    for name in ("ds_tensor_parallel_size", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size")
}
"""Tensor parallelism flags in training commands."""
SHARED_SEQUENCES = {
    "ring_attn_size": Foreign(1, _renamed("sequence_parallel_size")),
    "ulysses_sequence_parallel_size": Foreign(1, _renamed("sequence_parallel_size")),
    "ring_head_stride": Foreign(1, _not_needed),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Foreign(1, _renamed("sequence_parallel_size")),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": Foreign(1, _renamed("ref_sequence_parallel_size")),
    "critic.ulysses_sequence_parallel_size": Foreign(1, _renamed("critic_sequence_parallel_size")),
    "reward_model.ulysses_sequence_parallel_size": Foreign(1, _renamed("reward_sequence_parallel_size")),
    "worker.actor.ulysses_size": Foreign(1, _renamed("sequence_parallel_size")),
    "worker.ref.ulysses_size": Foreign(1, _renamed("ref_sequence_parallel_size")),
    "worker.critic.ulysses_size": Foreign(1, _renamed("critic_sequence_parallel_size")),
}
"""Sequence parallelism flags in training commands, including verl's and EasyR1's with sections."""

TEACHER_WRITES = (
    "run rlhf generate --pretrain TEACHER --select all, then pass the selected.jsonl with the teacher's responses as "
    "--dataset"
)

STUDENT_WRITES = "to train on the student's own responses, run rlhf gkd --prompt_data DATA with the same --lmbda"

OF_COMMAND: dict[str, dict[str, Foreign]] = {
    "merge": {
        "model_path": Foreign(1, _renamed("base")),
        "lora_path": Foreign(1, _renamed("model")),
        "output_path": Foreign(1, _renamed("output")),
        "is_rm": Foreign(0, _not_needed),
    },
    "generate": {
        "eval_task": Foreign(
            1, _one_of("generate", "generate_vllm", instead="rlhf generate scores responses if a reward is set")
        ),
        "dataset": Foreign(1, _renamed("prompt_data")),
        "dataset_probs": Foreign(1, _renamed("prompt_data_probs")),
        "output_path": Foreign(1, _renamed("output")),
        "post_processor": Foreign(1, _post_processor),
        "best_of_n": Foreign(1, _renamed("n_samples_per_prompt")),
        "tp_size": Foreign(1, _renamed("vllm_tensor_parallel_size")),
        "tensor_parallel_size": Foreign(1, _renamed("vllm_tensor_parallel_size")),
        "zero_stage": Foreign(1, _not_needed),
        "greedy_sampling": Foreign(0, _as({"temperature": ["0"]})),
    },
    "chat": {
        "model_name_or_path": Foreign(1, _renamed("pretrain")),
        "model_revision": Foreign(1, _refused("download the revision and pass the folder as --pretrain")),
        "greedy_sampling": Foreign(0, _as({"temperature": ["0"]})),
        "do_sample": Foreign(1, _one_of("true", "True", instead="use --temperature 0")),
        "num_beams": Foreign(1, _only(1, instead="beam search is not supported")),
        "eos_tokens": Foreign(1, _renamed("stop")),
        "eos_token_ids": Foreign(1, _refused("pass the tokens as text with --stop")),
        "max_len": Foreign(1, _not_needed),
        "save_folder": Foreign(1, _refused("use /save FILE in the chat to save the conversation")),
        "user": Foreign(1, _not_needed),
        "attn_implementation": Foreign(1, _not_needed),
        "device": Foreign(1, _refused("a GPU is used if available; set CUDA_VISIBLE_DEVICES= to use the CPU")),
    },
    **dict.fromkeys(TRAINING, SHARED_SEQUENCES | SPLIT_LAYERS),
    "data": SHARED_SEQUENCES,
    "distill": {
        **SHARED_SEQUENCES,
        **SPLIT_LAYERS,
        "teacher_model": Foreign(1, _renamed("teacher_pretrain")),
        "seq_kd": Foreign(1, _one_of("false", "False", instead=TEACHER_WRITES)),
        "lmbda": Foreign(1, _only(0, instead=STUDENT_WRITES)),
    },
    "gkd": {
        **SHARED_SEQUENCES,
        **SPLIT_LAYERS,
        "teacher_model": Foreign(1, _renamed("teacher_pretrain")),
        "seq_kd": Foreign(1, _one_of("false", "False", instead=TEACHER_WRITES)),
        "dataset_name": Foreign(1, _renamed("prompt_data")),
    },
    "serve-rm": {
        "batch_size": Foreign(1, _refused("use --max_tokens_per_gpu, the tokens per pack")),
        "attn_implementation": Foreign(1, _not_needed),
    },
}
"""Flags with a different meaning, or with any meaning, only in one command."""

TABLE: dict[str, Foreign] = {
    **{name: Foreign(0, _not_needed) for name in SWITCHES_NOT_NEEDED},
    **{name: Foreign(1, _not_needed) for name in VALUES_NOT_NEEDED},
    **{name: Foreign(1, _without_critic) for name in CRITIC_WORDS},
    "bf16": Foreign(0, _as({"param_dtype": ["bf16"]})),
    "ring_attn_size": Foreign(1, _only(1, instead=SHARED_ELSEWHERE)),
    "ulysses_sequence_parallel_size": Foreign(1, _only(1, instead=SHARED_ELSEWHERE)),
    "ring_head_stride": Foreign(1, _not_needed),
    "ds_tensor_parallel_size": Foreign(1, _only(1, instead=SPLIT_ELSEWHERE)),
    "max_images_per_prompt": Foreign(1, _only(0, instead=NO_IMAGES)),
    "gamma": Foreign(1, _only(1, instead="this command does not discount; rlhf ppo does")),
    "lambd": Foreign(1, _only(1, instead="this command has no critic; rlhf ppo supports --lambd")),
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
    "model_name_or_path": Foreign(1, _renamed("pretrain")),
    "dataset_name": Foreign(1, _by_kind(online="prompt_data", offline="dataset")),
    "output_dir": Foreign(1, _renamed("output")),
    "num_generations": Foreign(1, _renamed("n_samples_per_prompt")),
    "max_completion_length": Foreign(1, _renamed("max_new_tokens")),
    "max_prompt_length": Foreign(1, _refused("use --max_len, the limit for prompt plus response")),
    "per_device_train_batch_size": Foreign(1, _renamed("micro_train_batch_size")),
    "gradient_accumulation_steps": Foreign(1, _refused("use --train_batch_size, the responses per optimizer step")),
    "num_train_epochs": Foreign(1, _epochs),
    "max_seq_length": Foreign(1, _renamed("max_len")),
    "max_length": Foreign(1, _renamed("max_len")),
    "beta": Foreign(1, _refused("use --init_kl_coef, the KL weight")),
    **OPENRLHF,
    **TRL,
    **LLAMA_FACTORY,
    **SLIME,
    **EASYR1,
    "agent_func_path": Foreign(1, _refused(AN_AGENT)),
    "async_train": Foreign(0, _refused(NO_LAG)),
    "max_staleness": Foreign(1, _refused(NO_LAG)),
    "partial_rollout": Foreign(0, _refused(NO_LAG)),
    "pretrain_data": Foreign(1, _refused("a pre-training loss is not supported")),
    **{section: Foreign(None, _refused(FLAT)) for section in SECTIONS},
}
