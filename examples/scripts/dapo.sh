#!/usr/bin/env bash
# DAPO (arXiv 2503.14476): GRPO with clip-higher, a mean over all tokens, dynamic sampling of prompts, a length penalty
# in the last fifth of the longest response, and no KL divergence. `--preset dapo` sets all of these.
#
#   examples/scripts/dapo.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     base model: folder or Hugging Face name (Qwen/Qwen2.5-32B)
# PROMPTS   problems with answers: file, folder or Hugging Face name
# OUTPUT    run directory (default runs/dapo); an earlier run in it is resumed
#
# Environment variables and their defaults: NODES 16 with GPUS 8 each, ENGINES (GPUS / 4 per node) with
# TENSOR_PARALLEL 4 GPUs each, PROMPTS_PER_ITERATION 512, SAMPLES 16, TRAIN_BATCH_SIZE 512, MAX_NEW_TOKENS 20480,
# PROMPT_LEN 2048, ITERATIONS (all), FLAGS (more flags for grpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL PROMPTS [OUTPUT]}
DATA=${2:?usage: $0 MODEL PROMPTS [OUTPUT]}
OUTPUT=${3:-runs/dapo}
GPUS=${GPUS:-8}
NODES=${NODES:-16}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-20480}
MAX_LEN=$((MAX_NEW_TOKENS + ${PROMPT_LEN:-2048}))

rlhf grpo --preset dapo --pretrain "$MODEL" --prompt_data "$DATA" --output "$OUTPUT" --load_checkpoint \
  --reward_funcs math --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" --train_max_tokens_per_gpu "$MAX_LEN" \
  --rollout_batch_size "${PROMPTS_PER_ITERATION:-512}" --n_samples_per_prompt "${SAMPLES:-16}" \
  --train_batch_size "${TRAIN_BATCH_SIZE:-512}" ${ITERATIONS:+--max_iterations "$ITERATIONS"} --num_episodes 100 \
  --actor_learning_rate 1e-6 --l2 0.1 --zero_stage 3 \
  --actor_num_nodes "$NODES" --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "${ENGINES:-$((NODES * GPUS / 4))}" \
  --vllm_tensor_parallel_size "${TENSOR_PARALLEL:-4}" --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep \
  --gradient_checkpointing --save_steps 5 ${FLAGS:-}
