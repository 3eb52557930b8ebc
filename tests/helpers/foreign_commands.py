"""Commands with flags from OpenRLHF 0.8 to 0.10, TRL, EasyR1 and verl, with expected outcomes.

An outcome is `parses` with parts of the notes, or `refused` with parts of the error, separated by ` | `. Program names
are replaced by `rlhf` and its command, and model names are shortened; flags and values are unchanged.
"""

# ruff: noqa: E501 - one line per command and outcome is easiest to read

SFT = (
    "sft --max_len 4096 --dataset owner/chats --input_key question --output_key response --train_batch_size 256 "
    "--micro_train_batch_size 2 --max_samples 500000 --pretrain owner/model --save_path ./checkpoint/sft "
    "--save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --bf16 "
    "--learning_rate 5e-6 --gradient_checkpointing --adam_offload"
)
PAIRS = (
    "--save_path ./checkpoint/out --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256 "
    "--micro_train_batch_size 1 --pretrain owner/model --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 "
    "--dataset owner/pairs --apply_chat_template --chosen_key chosen --rejected_key rejected --flash_attn "
    "--packing_samples --gradient_checkpointing"
)
PPO = (
    "--ref_num_nodes 1 --ref_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 4 "
    "--vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.5 --pretrain owner/model "
    "--save_path ./out/policy --ckpt_path ./out/ckpt --train_batch_size 128 --micro_rollout_batch_size 16 "
    "--rollout_batch_size 1024 --max_epochs 1 --prompt_max_len 1024 --max_samples 100000 --generate_max_len 1024 "
    "--zero_stage 3 --bf16 --actor_learning_rate 5e-7 --init_kl_coef 0.01 --prompt_data owner/prompts "
    "--input_key context_messages --apply_chat_template --gradient_checkpointing --packing_samples "
    "--vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep --save_hf_ckpt"
)
CRITIC = "--critic_num_nodes 1 --critic_num_gpus_per_node 8 --critic_learning_rate 9e-6"
JUDGED = "--reward_pretrain owner/rm --reward_num_nodes 1 --reward_num_gpus_per_node 8 --normalize_reward"
FILE = "--remote_rm_url ./reward_func.py --label_key answer"

SECTIONS = (
    "--ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 4 "
    "--vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.5 "
    "--actor.model_name_or_path owner/model --ckpt.output_dir ./out/policy --ckpt.path ./out/ckpt --ckpt.save_hf "
    "--train.batch_size 128 --rollout.batch_size 1024 --train.dynamic_batch_enable --train.max_epochs 1 "
    "--prompt_max_len 1024 --data.max_samples 100000 --generate_max_len 1024 --ds.zero_stage 3 --ds.param_dtype bf16 "
    "--actor.adam.lr 5e-7 --algo.kl.init_coef 0.01 --data.prompt_dataset owner/prompts --data.input_key messages "
    "--data.apply_chat_template --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.sync_backend nccl "
    "--vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep --reward.remote_url ./reward_func.py"
)
SECTIONS_PPO = (
    "--critic.num_nodes 1 --critic.num_gpus_per_node 8 --critic.adam.lr 9e-6 --rollout.n_samples_per_prompt 1 "
    "--reward.model_name_or_path owner/rm --reward.num_nodes 1 --reward.num_gpus_per_node 8 --reward.normalize_enable"
)

COMMAND_LINES = {
    # OpenRLHF: the four commands in its README, then variants of its scripts.
    f"{SFT} --flash_attn --use_wandb s3cret": "parses: ignored, not needed: --packing_samples, --flash_attn | WANDB_API_KEY",
    f"{SFT.replace('sft', 'distill', 1).replace('checkpoint/sft', 'checkpoint/kd')} --teacher_model owner/teacher --kd_coef 0.4": "parses: --teacher_pretrain",
    "distill --pretrain m --teacher_model t --dataset d --output o --teacher_offload": "parses: --teacher_pretrain",
    "distill --pretrain m --teacher_model_name_or_path t --dataset d --output o --seq_kd false --lmbda 0.0": "parses: ignored, not needed: --seq_kd false, --lmbda 0.0",
    "distill --pretrain m --teacher_pretrain t --dataset d --output o --seq_kd true": "refused: run rlhf generate --pretrain TEACHER --select all",
    "distill --pretrain m --teacher_pretrain t --dataset d --output o --lmbda 0.5": "refused: to train on the student's own responses, run rlhf gkd --prompt_data DATA with the same --lmbda",
    "gkd --pretrain m --teacher_model_name_or_path t --dataset_name d --lmbda 0.5 --beta 0.5 --temperature 0.9 --seq_kd false --learning_rate 2e-5 --output o": "parses: --teacher_pretrain t | --prompt_data d | --actor_learning_rate 2e-5 | ignored, not needed: --seq_kd false",
    "gkd --pretrain m --teacher_model t --prompt_data d --output o --seq_kd true": "refused: run rlhf generate --pretrain TEACHER --select all",
    f"{SFT} --input_template 'User: {{}}\\nAssistant: '": "parses: --no_apply_chat_template",
    f"rm {PAIRS} --learning_rate 9e-6": "parses: ignored, not needed: --flash_attn, --packing_samples",
    f"dpo {PAIRS} --learning_rate 5e-7 --beta 0.1": "parses: the model is written to ./checkpoint/out",
    f"ppo {PPO} {CRITIC} {JUDGED} --n_samples_per_prompt 1 --micro_train_batch_size 8": "parses: is translated to --max_len 2048",
    f"ppo {PPO} {CRITIC} {JUDGED} --advantage_estimator gae": "parses: ignored, not needed",
    f"ppo {PPO} {CRITIC} {FILE}": "parses: --reward_func ./reward_func.py",
    f"ppo {PPO} {CRITIC} {FILE} --normalize_reward --colocate_actor_ref --adam_offload": "parses: --reward_func ./reward_func.py",
    f"ppo {PPO} {CRITIC} {JUDGED} --advantage_estimator group_norm": "refused: for group_norm, run rlhf grpo",
    f"grpo {PPO} {FILE} --advantage_estimator group_norm --n_samples_per_prompt 8": "parses: --advantage_estimator group_norm",
    f"grpo {PPO} {FILE} --advantage_estimator dr_grpo --n_samples_per_prompt 8": "parses: --preset dr_grpo",
    f"rloo {PPO} {FILE} --advantage_estimator rloo --n_samples_per_prompt 8": "parses: ignored, not needed",
    f"reinforce++ {PPO} {FILE} --advantage_estimator reinforce": "parses: ignored, not needed",
    f"reinforce++ {PPO} {FILE} --advantage_estimator reinforce_baseline --n_samples_per_prompt 8": "parses: --baseline group",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --gamma 1.0 --lambd 1": "parses: --gamma 1.0, --lambd 1",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --gamma 0.9": "refused: this command does not discount",
    f"grpo {PPO} {FILE} {CRITIC} --n_samples_per_prompt 8": "parses: --critic_num_nodes 1",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --freezing_actor_steps -1": "parses: --freezing_actor_steps -1",
    f"ppo {PPO} {CRITIC} {FILE} --freezing_actor_steps -1": "parses",
    f"ppo {SECTIONS} {SECTIONS_PPO}": "parses: flags without sections: --ref.num_nodes is --ref_num_nodes",
    f"ppo {SECTIONS} {SECTIONS_PPO} --actor.optim lion": "refused: --optim",
    f"ppo {SECTIONS} {SECTIONS_PPO} --train.async_enable --train.partial_rollout_enable": "parses",
    f"ppo {SECTIONS} {SECTIONS_PPO} --critic.lr_scheduler constant": "refused: actor and critic share --lr_scheduler",
    f"grpo {SECTIONS} --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --actor.eps_clip 0.2": "parses",
    "sft --model.model_name_or_path m --data.dataset d --ckpt.output_dir out --train.batch_size 8 --adam.lr 5e-6 "
    "--data.multiturn --ds.packing_samples --ds.zero_stage 2 --logger.wandb.key s3cret": "parses: WANDB_API_KEY",
    "rm --model.model_name_or_path m --data.dataset d --ckpt.output_dir out --model.loss_type logexp": "parses",
    f"ppo {PPO} {CRITIC} {FILE} --no_advantage_std_norm": "refused: --preset dr_grpo",
    f"ppo {PPO} {CRITIC} {FILE} --disable_ds_ckpt": "refused: --save_steps -1",
    f"ppo {PPO} {CRITIC} {FILE} --full_determinism": "refused: --seed fixes the run",
    f"{SFT} --freeze_visual_encoder --image_key images --max_images_per_prompt 0": "parses: is translated to --freeze_vision_tower",
    "gkd --pretrain m --teacher_pretrain t --prompt_data d --output o --image_key images": "parses",
    f"ppo {PPO} {CRITIC} {FILE} --vllm_enable_is_correction --use_icepop": "parses: --rollout_correction token_mask",
    f"ppo {PPO} {CRITIC} {FILE} --use_icepop --vllm_is_truncated_threshold 0.5 5.0": "parses: --rollout_correction_range 0.5 5.0",
    "merge --model_path base --lora_path adapter --output_path whole --param_dtype bf16": "parses: --lora_path adapter is translated to --model",
    "generate --eval_task generate_vllm --pretrain m --dataset d --output_path out.jsonl --post_processor rs --best_of_n 4 "
    "--reward_pretrain rm": "parses: --select best | --n_samples_per_prompt 4",
    "generate --eval_task rm --pretrain m --dataset d --output_path out.jsonl": "refused: rlhf generate scores responses if",
    "chat --pretrain m --bf16 --max_len 4096 --greedy_sampling --enable_prefix_caching": "refused: unknown flag --enable_prefix_caching",
    "chat --pretrain m --bf16 --max_len 4096 --max_new_tokens 256 --greedy_sampling --apply_chat_template": "parses: --greedy_sampling is translated to --temperature 0 | ignored, not needed: --max_len",
    "chat --model_name_or_path m --dtype bfloat16 --do_sample true --top_k 50 --eos_tokens User:": "parses: --model_name_or_path m is translated to --pretrain m | --eos_tokens User: is translated to --stop",
    "chat --model_name_or_path m --save_folder talks": "refused: /save FILE",
    "chat m --num_beams 4": "refused: beam search is not supported",
    "serve-rm --reward_pretrain rm --batch_size 16": "refused: use --max_tokens_per_gpu",
    f"ppo {PPO} {CRITIC} {FILE} --ring_attn_size 1 --ds_tensor_parallel_size 1": "parses: --ring_attn_size 1",
    f"ppo {PPO} {CRITIC} {FILE} --ring_attn_size 2 --ring_head_stride 2": "parses: --ring_attn_size 2 is translated to --sequence_parallel_size 2",
    "sft --pretrain m --dataset d --save_path out --ring_attn_size 2 --ring_head_stride 2": "parses: --ring_attn_size 2 is translated to --sequence_parallel_size 2",
    f"ppo {PPO} {CRITIC} {FILE} --actor_rollout_ref.actor.ulysses_sequence_parallel_size 2 "
    "--critic.ulysses_sequence_parallel_size=1": "parses: is translated to --sequence_parallel_size 2 | is translated to --critic_sequence_parallel_size 1",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --actor_rollout_ref.ref.ulysses_sequence_parallel_size 2": (
        "parses: --ref_sequence_parallel_size 2"
    ),
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --worker.actor.ulysses_size 2": "parses: --sequence_parallel_size 2",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --critic.ulysses_sequence_parallel_size 2": (
        "refused: corresponds to --critic_sequence_parallel_size, which rlhf grpo does not support"
    ),
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --actor_rollout_ref.rollout.n 8": "refused: --n_samples_per_prompt is given more than once",
    "generate --pretrain m --prompt_data d --output o --ulysses_sequence_parallel_size 2": (
        "refused: only training commands support sequence parallelism"
    ),
    f"ppo {PPO} {CRITIC} {FILE} --ds_tensor_parallel_size 4": "parses: --ds_tensor_parallel_size 4 is translated to --tensor_parallel_size 4",
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --actor_rollout_ref.actor.megatron.tensor_model_parallel_size 2": (
        "parses: --tensor_parallel_size 2"
    ),
    "generate --pretrain m --prompt_data d --output o --tensor_parallel_size 2": "parses: --vllm_tensor_parallel_size 2",
    "eval --model m --prompt_data d --output o --ds_tensor_parallel_size 2": (
        "refused: only training commands support tensor parallelism"
    ),
    f"ppo {PPO} {CRITIC} {FILE} --policy_loss_type gspo": "parses: --policy_loss gspo",
    f"ppo {PPO} {CRITIC} {FILE} --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 2.0": (
        "parses: --rollout_correction_cap 2.0"
    ),
    f"ppo {PPO} {CRITIC} {FILE} --enable_vllm_is_correction --vllm_is_correction_type icepop "
    "--vllm_is_truncated_threshold 0.5 5.0": "parses: --rollout_correction token_mask | --rollout_correction_range 0.5 5.0",
    f"ppo {PPO} {CRITIC} {FILE} --agent_func_path agent.py": "refused: write a class with step(text) or tools in --environment FILE.py",
    f"ppo {PPO} {CRITIC} {FILE} --async_train --async_queue_size 2": "parses: --max_staleness 2",
    f"ppo {PPO} {CRITIC} {FILE} --async_train --partial_rollout": "parses",
    f"{SFT} --async_train": "refused: only ppo, reinforce++, grpo, rloo and remax support asynchronous sampling",
    f"{SFT} --partial_rollout": "refused: only ppo, reinforce++, grpo, rloo and remax support asynchronous sampling",
    f"ppo {PPO} {CRITIC} {FILE} --use_dynamic_batch --rollout_max_tokens_per_gpu 16192": "parses: --use_dynamic_batch",
    f"ppo {PPO} {CRITIC} {FILE} --actor_init_on_gpu --perf --ptx_coef 0.05": "parses: --ptx_coef 0.05",
    f"ppo {PPO} {CRITIC} {FILE} --use_tensorboard ./tb": "parses: to the output folder, not to ./tb",
    f"{SFT} --lora_rank 64 --lora_alpha 64 --target_modules q_proj v_proj": "parses",
    f"{SFT} --multiturn --dataloader_num_workers 4 --disable_fast_tokenizer": "parses: --dataloader_num_workers 4",
    f"{SFT} --aux_loss_coef 0": "parses",
    f"{SFT} --aux_loss_coef 0.01": "parses",
    f"{SFT} --train_split train": "parses: --dataset_split train",
    f"dpo {PAIRS} --ipo": "parses: --loss ipo",
    f"rm {PAIRS} --compute_fp32_loss": "parses: --compute_fp32_loss",
    f"{SFT} --lora_rank 64 --use_dora --use_rslora --exclude_modules o_proj down_proj": "parses",
    # LLaMA-Factory: adapter settings.
    f"{SFT} --lora_rank 8 --lora_target all --use_rslora": "parses: --lora_target all is translated to --target_modules all-linear",
    f"{SFT} --lora_rank 8 --lora_target q_proj,v_proj": "parses: --target_modules q_proj,v_proj",
    f"{SFT} --finetuning_type lora --adapter_name_or_path a --quantization_bit 4": (
        "refused: use --lora_rank | pass the adapter folder as --pretrain | use --load_in_4bit"
    ),
    # TRL: its flag names with these commands.
    "sft --pretrain m --dataset d --output o --lora_r 16 --use_dora --lora_task_type CAUSAL_LM": (
        "parses: --lora_rank 16 | ignored, not needed: --lora_task_type CAUSAL_LM"
    ),
    "sft --pretrain m --dataset d --output o --lora_r 16 --lora_modules_to_save lm_head": "refused: linear layers",
    "sft --model_name_or_path owner/model --dataset_name owner/chats --output_dir out": (
        "parses: --model_name_or_path owner/model is translated to --pretrain owner/model | --dataset owner/chats | --output out"
    ),
    "sft --pretrain m --dataset d --output o --per_device_train_batch_size 2": ("parses: --micro_train_batch_size 2"),
    "sft --pretrain m --dataset d --output o --num_train_epochs 3": "parses: --max_epochs 3",
    "grpo --pretrain m --dataset_name d --output o --reward_funcs math --num_train_epochs 2.0": (
        "parses: --prompt_data d | --num_episodes 2"
    ),
    "sft --pretrain m --dataset d --output o --gradient_checkpointing true --use_liger_kernel False": (
        "parses: --gradient_checkpointing | --no_use_liger_kernel"
    ),
    "sft --pretrain m --dataset d --output o --report_to none --overwrite_output_dir true --push_to_hub false": (
        "parses: --no_use_tensorboard | --overwrite"
    ),
    "sft --pretrain m --dataset d --output o --report_to mlflow": "parses: --use_mlflow",
    "sft --pretrain m --dataset d --output o --report_to comet_ml": "refused: use --use_tensorboard, --use_wandb",
    "grpo --pretrain m --prompt_data d --output o --reward_funcs math --num_generations 8": (
        "parses: --n_samples_per_prompt 8"
    ),
    "grpo --pretrain m --prompt_data d --output o --reward_funcs math --max_completion_length 512 --beta 0.04": (
        "parses: --beta 0.04 is translated to --init_kl_coef 0.04 --use_kl_loss --kl_estimator k3"
    ),
    "grpo --pretrain m --prompt_data d --output o --n_samples_per_prompt 8 --reward_funcs math --top_k 50 --min_p 0.1 "
    "--repetition_penalty 1.0": "parses: ignored, not needed: --repetition_penalty 1.0",
    "grpo --pretrain m --prompt_data d --output o --repetition_penalty 1.1": (
        "refused: --repetition_penalty: not supported in training | rlhf generate"
    ),
    "grpo --pretrain m --prompt_data d --output o --reward_funcs math --n_samples_per_prompt 8 --learning_rate 1e-6 "
    "--warmup_ratio 0.1 --lr_scheduler_type cosine --lora_r 16 --torch_dtype bfloat16": (
        "parses: --actor_learning_rate 1e-6 | --lr_warmup_ratio 0.1 | --lora_rank 16 | --param_dtype bf16"
    ),
    "grpo --pretrain m --prompt_data d --output o --reward_funcs math --num_iterations 1 --epsilon 0.2 --loss_type dapo "
    "--scale_rewards true --use_vllm true --vllm_mode colocate --report_to wandb --max_steps 100": (
        "parses: --loss_agg token_mean | --advantage_std group | --vllm_mode colocate | --max_iterations 100"
    ),
    "sft --pretrain m --dataset d --output o --packing true --assistant_only_loss true --use_peft --lora_r 8": (
        "parses: --lora_r 8 is translated to --lora_rank 8"
    ),
    "sft --pretrain m --dataset d --output o --use_peft": "refused: use --lora_rank",
    "sft --pretrain m --dataset d --output o --warmup_steps 0.1 --adam_epsilon 1e-7": (
        "parses: --warmup_steps 0.1 is translated to --lr_warmup_ratio 0.1 | --adam_epsilon 1e-7 is translated to --adam_eps 1e-7"
    ),
    "dpo --pretrain m --dataset d --output o --warmup_steps 150 --adam_beta2 0.999": "parses: --adam_betas 0.9 0.999",
    f"{SFT} --optim adamw_torch_fused": "parses: --optim adamw_torch_fused is translated to --optim adamw",
    f"ppo {PPO} {CRITIC} {FILE} --actor.optim adam --critic.optim adam": "refused: actor and critic share",
    f"{SFT} --optim muon --muon.lr 0.02 --muon.momentum 0.95": "refused: use one learning rate for both",
    f"ppo {SECTIONS} {SECTIONS_PPO} --actor.optim muon --actor.muon.ns_steps 5": "parses: --muon_ns_steps 5",
    f"{SFT} --optim paged_adamw_8bit": "parses: --optim paged_adamw_8bit is translated to --optim adamw_8bit",
    f"dpo {PAIRS} --zero_hpz_partition_size 8 --ref.offload": "parses: --zpg 8",
    f"ppo {PPO} {CRITIC} {FILE} --ref_reward_offload": "parses: --ref_reward_offload is translated to --ref_offload",
    f"ppo {SECTIONS} {SECTIONS_PPO} --ref.offload --reward.offload": "parses: --ref_reward_offload",
    f"{SFT} --enable_activation_offload": "parses: --activation_offload",
    f"{SFT} --adam.eps 1e-6": "parses: --adam.eps is --adam_eps",
    "sft --pretrain m --dataset d --output o --assistant_only_loss false": "refused: --pretrain_mode",
    "grpo --pretrain m --prompt_data d --output o --reward_funcs math format --reward_weights 1.0 0.5 "
    "--n_samples_per_prompt 8 --bf16 true": "parses: --param_dtype bf16",
    "grpo --pretrain m --prompt_data d --output o --reward_funcs accuracy format tag_count": (
        "parses: --reward_funcs accuracy format tag_count is translated to --reward_funcs math,format,tag_count"
    ),
    "kto --pretrain m --dataset d --output o --generate_max_len 100": (
        "refused: --generate_max_len: corresponds to --max_new_tokens, which rlhf kto does not support"
    ),
    "generate --pretrain m --dataset d --output_path o --post_processor csft": "refused: --select best",
    f"ppo {PPO} {CRITIC} {FILE} --max_len 2048": "refused: drop --prompt_max_len",
    # On-policy distillation: settings in TRL, slime and verl.
    "grpo --pretrain m --prompt_data d --output o --n_samples_per_prompt 8 --teacher_model_name_or_path t": (
        "parses: --teacher_pretrain t"
    ),
    "grpo --pretrain m --prompt_data d --output o --n_samples_per_prompt 8 --use-opd --opd-type megatron "
    "--opd-kl-coef 0.5 --opd-teacher-load t": (
        "parses: ignored, not needed: --use_opd, --opd_type megatron | --distill_coef 0.5 | --teacher_pretrain t"
    ),
    "grpo --pretrain m --prompt_data d --output o --opd-type sglang": "refused: the teacher is part of the run",
    "grpo --distillation.enabled true": "refused: --distillation.enabled: no equivalent",
    # EasyR1 and verl: nested settings.
    "grpo data.train_files=d worker.actor.model.model_path=m --output o --reward_funcs math": "parses: --pretrain m",
    f"grpo {PPO.replace('--actor_learning_rate 5e-7 ', '')} {FILE} --actor_rollout_ref.actor.optim.lr 1e-6": (
        "parses: --actor_learning_rate 1e-6"
    ),
    f"grpo {PPO} {FILE} --n_samples_per_prompt 8 --data.format_prompt math.jinja": (
        "parses: --data.format_prompt math.jinja is translated to --format_prompt math.jinja"
    ),
    "sft --pretrain m --dataset d --output o --data.format_prompt math.jinja": "refused: format_prompt",
    "grpo --trainer.no_such 3": "refused: --trainer.no_such: no equivalent; docs/coming-from.md lists",
}
