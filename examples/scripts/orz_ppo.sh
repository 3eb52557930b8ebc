#!/usr/bin/env bash
# Open-Reasoner-Zero (arXiv 2503.24290): PPO on a base model with a verifier as the only reward.
# GAE with gamma = lambda = 1, no KL divergence, 128 prompts x 64 responses, one actor step and twelve critic steps per
# iteration, and the R1-Zero prompt. Responses end with the answer or before the next turn; only answers that are right
# and not truncated are rewarded.
#
#   examples/scripts/orz_ppo.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     base model: folder or Hugging Face name (Qwen/Qwen2.5-7B)
# PROMPTS   problems with answers: file, folder or Hugging Face name
# OUTPUT    run directory (default runs/orz_ppo); an earlier run in it is resumed
#
# Environment variables and their defaults: GPUS 8 (on one machine), PROMPTS_PER_ITERATION 128, SAMPLES 64,
# MAX_NEW_TOKENS 8000, MAX_LEN 10000, ITERATIONS (all), FLAGS (more flags for ppo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL PROMPTS [OUTPUT]}
DATA=${2:?usage: $0 MODEL PROMPTS [OUTPUT]}
OUTPUT=${3:-runs/orz_ppo}
GPUS=${GPUS:-8}
PROMPTS=${PROMPTS_PER_ITERATION:-128}
SAMPLES=${SAMPLES:-64}

rlhf ppo --pretrain "$MODEL" --prompt_data "$DATA" --output "$OUTPUT" --load_checkpoint \
  --prompt_template r1_zero --max_len "${MAX_LEN:-10000}" --stop "User:,Human:,Assistant:,</answer>" \
  --reward_funcs math --stop_properly_penalty_coef 0 \
  --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$SAMPLES" --max_new_tokens "${MAX_NEW_TOKENS:-8000}" \
  --train_batch_size "$((PROMPTS * SAMPLES))" --critic_update_steps 12 ${ITERATIONS:+--max_iterations "$ITERATIONS"} \
  --gamma 1 --lambd 1 --init_kl_coef 0 --actor_learning_rate 1e-6 --critic_learning_rate 5e-6 \
  --zero_stage 3 --actor_num_gpus_per_node "$GPUS" --critic_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" \
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.7 \
  --gradient_checkpointing --save_steps 10 ${FLAGS:-}
