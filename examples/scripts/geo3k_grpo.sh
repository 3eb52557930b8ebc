#!/usr/bin/env bash
# Geometry problems with images: GRPO on a vision-language model with rewards for the right answer and the response
# format. Sizes and the template that appends the format to each question are those with which EasyR1 trains
# Qwen2.5-VL-7B on Geometry3K.
#
#   examples/scripts/geo3k_grpo.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     folder or Hugging Face name (Qwen/Qwen2.5-VL-7B-Instruct)
# PROMPTS   rows with images, problem and answer: file, folder or Hugging Face name (hiyouga/geometry3k)
# OUTPUT    run directory (default runs/geo3k_grpo); an earlier run in it is resumed
#
# Environment variables and their defaults: GPUS 8, PROMPTS_PER_ITERATION 512, SAMPLES 5, TRAIN_BATCH_SIZE 640,
# MAX_NEW_TOKENS 2048, MAX_LEN 4096, MIN_PIXELS 262144, MAX_PIXELS 4194304, ITERATIONS (all),
# FLAGS (more flags for grpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL PROMPTS [OUTPUT]}
DATA=${2:?usage: $0 MODEL PROMPTS [OUTPUT]}
OUTPUT=${3:-runs/geo3k_grpo}
GPUS=${GPUS:-8}

rlhf grpo --pretrain "$MODEL" --prompt_data "$DATA" --output "$OUTPUT" --load_checkpoint \
  --format_prompt "$(dirname "$0")/../templates/think_boxed.jinja" \
  --reward_funcs math,format --reward_weights 0.9,0.1 \
  --min_pixels "${MIN_PIXELS:-262144}" --max_pixels "${MAX_PIXELS:-4194304}" \
  --rollout_batch_size "${PROMPTS_PER_ITERATION:-512}" --n_samples_per_prompt "${SAMPLES:-5}" \
  --train_batch_size "${TRAIN_BATCH_SIZE:-640}" --max_new_tokens "${MAX_NEW_TOKENS:-2048}" \
  --max_len "${MAX_LEN:-4096}" ${ITERATIONS:+--max_iterations "$ITERATIONS"} --num_episodes 15 \
  --actor_learning_rate 1e-6 --init_kl_coef 0.01 --use_kl_loss --kl_estimator k3 --zero_stage 3 \
  --actor_num_gpus_per_node "$GPUS" --ref_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" \
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --gradient_checkpointing --save_steps 5 \
  ${FLAGS:-}
