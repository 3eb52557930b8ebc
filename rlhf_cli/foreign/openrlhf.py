"""OpenRLHF flag names with sections (0.10.2 and later), mapped to the flat names that they replaced."""

# Sections whose flags are flat names after the first dot.
_SAME_AFTER_SECTION = {
    "actor": "aux_loss_coef dual_clip eps_clip eps_clip_low_high freeze_visual_encoder policy_loss_type optim "
    "lr_scheduler lr_warmup_ratio min_lr_ratio max_norm",
    "data": "apply_chat_template chosen_key dataloader_num_workers dataset dataset_probs dataset_split "
    "disable_fast_tokenizer image_key input_key input_template label_key max_images_per_prompt "
    "max_len max_samples multiturn output_key prompt_key prompt_split rejected_key tokenizer_chat_template",
    "ds": "adam_offload attn_implementation deepcompile experts_implementation grad_accum_dtype load_in_4bit "
    "overlap_comm "
    "packing_samples param_dtype ring_attn_size use_liger_kernel value_head_prefix zero_stage zpg",
    "ckpt": "best_metric_key save_steps",
    "logger": "logging_steps",
    "model": "aux_loss_coef beta label_smoothing nll_loss_coef",
    "reward": "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
    "rollout": "max_new_tokens n_samples_per_prompt temperature top_p vllm_generate_batch_size",
    "train": "agent_func_path async_queue_size colocate_actor_ref ema_beta enable_ema max_epochs num_episodes seed",
    "vllm": "enable_prefix_caching enforce_eager",
}
_OTHERS = {
    "actor.adam.betas": "adam_betas",
    "actor.adam.eps": "adam_eps",
    "actor.adam.lr": "actor_learning_rate",
    "actor.adam.weight_decay": "l2",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.model_name_or_path": "pretrain",
    "adam.betas": "adam_betas",
    "adam.eps": "adam_eps",
    "adam.lr": "learning_rate",
    "adam.weight_decay": "l2",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.advantage.is_correction_threshold": "vllm_is_truncated_threshold",
    "algo.advantage.is_correction_type": "vllm_is_correction_type",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_hf": "save_hf_ckpt",
    "critic.adam.betas": "critic_adam_betas",
    "critic.adam.eps": "critic_adam_eps",
    "critic.adam.lr": "critic_learning_rate",
    "critic.adam.weight_decay": "critic_l2",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.save_value_network": "save_value_network",
    "critic.value_clip": "value_clip",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.rank": "lora_rank",
    "ds.lora.target_modules": "target_modules",
    "ds.ring_attn_head_stride": "ring_head_stride",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "eval.dataset": "eval_dataset",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
    "model.compute_fp32_loss_enable": "compute_fp32_loss",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "model.ipo_enable": "ipo",
    "model.loss_type": "loss",
    "model.margin_loss_enable": "margin_loss",
    "model.model_name_or_path": "pretrain",
    "model.pretrain_mode_enable": "pretrain_mode",
    "muon.no_nesterov": "muon_no_nesterov",
    "ref.model_name_or_path": "ref_pretrain",
    "ref.offload": "ref_offload",
    "reward.clip_range": "reward_clip_range",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.normalize_enable": "normalize_reward",
    "reward.offload": "ref_reward_offload",
    "reward.remote_url": "remote_rm_url",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "train.async_enable": "async_train",
    "train.batch_size": "train_batch_size",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.full_determinism_enable": "full_determinism",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.partial_rollout_enable": "partial_rollout",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.sync_backend": "vllm_sync_backend",
    "vllm.sync_with_ray": "vllm_sync_with_ray",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
}
_PLACES = {
    f"{role}.{name}": f"{role}_{name}"
    for role in ("actor", "critic", "ref", "reward")
    for name in ("num_nodes", "num_gpus_per_node")
}
_SCHEDULE = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
_CRITIC_SCHEDULE = {f"critic.{name}": f"critic_{name}" for name in _SCHEDULE}
_MUON = {
    f"{prefix}muon.{name}": f"muon_{name}"
    for prefix in ("", "actor.", "critic.")
    for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")
}

FLAT_NAMES = {
    **{f"{section}.{name}": name for section, names in _SAME_AFTER_SECTION.items() for name in names.split()},
    **_PLACES,
    **_CRITIC_SCHEDULE,
    **_MUON,
    **_OTHERS,
}
"""Flat name by sectioned name."""
