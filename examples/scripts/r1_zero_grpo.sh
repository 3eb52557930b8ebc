#!/usr/bin/env bash
# R1-Zero at small scale: GRPO on a chat model that learns to think before it answers. The reward is a sum of five:
# right answer, response format, visible steps, a cosine of the length, and a repetition penalty.
#
#   examples/scripts/r1_zero_grpo.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     folder or Hugging Face name (Qwen/Qwen2.5-1.5B-Instruct)
# PROMPTS   problems with answers: file, folder or Hugging Face name
# OUTPUT    run directory (default runs/r1_zero_grpo); an earlier run in it is resumed
#
# Environment variables and their defaults: GPUS 1, PROMPTS_PER_ITERATION 32, SAMPLES 8, MAX_NEW_TOKENS 1024,
# MAX_LEN 2048, ITERATIONS (all), FLAGS (more flags for grpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL PROMPTS [OUTPUT]}
DATA=${2:?usage: $0 MODEL PROMPTS [OUTPUT]}
OUTPUT=${3:-runs/r1_zero_grpo}
GPUS=${GPUS:-1}
PROMPTS=${PROMPTS_PER_ITERATION:-32}
SAMPLES=${SAMPLES:-8}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}

rlhf grpo --pretrain "$MODEL" --prompt_data "$DATA" --output "$OUTPUT" --load_checkpoint \
  --system_prompt "First think about the problem, then give the answer: <think> your thoughts </think><answer> the answer </answer>" \
  --reward_funcs "math,format,reasoning_steps,cosine(max_len=$MAX_NEW_TOKENS),repetition_penalty" \
  --reward_weights 1,0.5,0.2,0.5,1 \
  --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$SAMPLES" --train_batch_size "$((PROMPTS * SAMPLES))" \
  --max_new_tokens "$MAX_NEW_TOKENS" --max_len "${MAX_LEN:-2048}" ${ITERATIONS:+--max_iterations "$ITERATIONS"} \
  --actor_learning_rate 1e-6 --init_kl_coef 0.001 --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" \
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --gradient_checkpointing --save_steps 20 \
  ${FLAGS:-}
