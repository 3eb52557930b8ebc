#!/usr/bin/env bash
# PPO or REINFORCE++ with a reward model on one machine, where all models and engines take turns on the same GPUs.
#
#   examples/scripts/hybrid_engine.sh ppo MODEL REWARD_MODEL PROMPTS [OUTPUT]
#   examples/scripts/hybrid_engine.sh reinforce++ MODEL REWARD_MODEL PROMPTS [OUTPUT]
#
# MODEL          fine-tuned model: folder, run of `rlhf sft`, or Hugging Face name
# REWARD_MODEL   run of `rlhf rm`, folder or Hugging Face name, with the same vocabulary
# PROMPTS        file, folder or Hugging Face name
# OUTPUT         run directory (default runs/hybrid_engine); an earlier run in it is resumed
#
# Environment variables and their defaults: GPUS 8, PROMPTS_PER_ITERATION 1024, TRAIN_BATCH_SIZE 128,
# MAX_NEW_TOKENS 1024, MAX_LEN 2048, ITERATIONS (all), FLAGS (more flags for the command).
set -euo pipefail

COMMAND=${1:?usage: $0 ppo|reinforce++ MODEL REWARD_MODEL PROMPTS [OUTPUT]}
MODEL=${2:?usage: $0 ppo|reinforce++ MODEL REWARD_MODEL PROMPTS [OUTPUT]}
REWARD_MODEL=${3:?usage: $0 ppo|reinforce++ MODEL REWARD_MODEL PROMPTS [OUTPUT]}
DATA=${4:?usage: $0 ppo|reinforce++ MODEL REWARD_MODEL PROMPTS [OUTPUT]}
OUTPUT=${5:-runs/hybrid_engine}
GPUS=${GPUS:-8}

SHARED=(
  --pretrain "$MODEL" --reward_pretrain "$REWARD_MODEL" --prompt_data "$DATA" --output "$OUTPUT" --load_checkpoint
  --rollout_batch_size "${PROMPTS_PER_ITERATION:-1024}" --train_batch_size "${TRAIN_BATCH_SIZE:-128}"
  --max_new_tokens "${MAX_NEW_TOKENS:-1024}" --max_len "${MAX_LEN:-2048}"
  ${ITERATIONS:+--max_iterations "$ITERATIONS"} --actor_learning_rate 5e-7 --init_kl_coef 0.01
  --zero_stage 3 --actor_num_gpus_per_node "$GPUS" --ref_num_gpus_per_node "$GPUS" --reward_num_gpus_per_node "$GPUS"
  --vllm_num_engines "$((GPUS > 1 ? GPUS / 2 : 1))" --vllm_tensor_parallel_size "$((GPUS > 1 ? 2 : 1))"
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.5
  --gradient_checkpointing --save_steps 20
)
if [ "$COMMAND" = ppo ]; then
  rlhf ppo "${SHARED[@]}" --critic_num_gpus_per_node "$GPUS" --critic_learning_rate 9e-6 --critic_pretrain "$REWARD_MODEL" ${FLAGS:-}
else
  rlhf reinforce++ "${SHARED[@]}" ${FLAGS:-}
fi
