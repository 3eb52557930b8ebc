#!/usr/bin/env bash
# Skywork-OR1 (arXiv 2505.22312): GRPO on problems of mathematics in stages of growing length, with an entropy bonus that
# holds the entropy at a target, no KL divergence, and groups dropped whose responses are all right or all wrong. Two GPUs
# share each sequence of the stage with 32k tokens.
#
#   examples/scripts/skywork_or1.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     a reasoning model: a folder or a Hugging Face name (deepseek-ai/DeepSeek-R1-Distill-Qwen-7B)
# PROMPTS   problems with their answers: a file, a folder or a Hugging Face name
# OUTPUT    folder of the stages; runs/skywork_or1 by default. What is there is continued.
#
# From the environment: STAGES "8192 16384 32768" (tokens of a response), ITERATIONS 300 a stage, GPUS 8,
# PROMPTS_PER_ITERATION 256, SAMPLES 16, PROMPT_LEN 2048, LONGEST_ALONE 20000 (tokens of a sequence, above which two GPUs
# share it), FLAGS (further flags of `rlhf grpo`).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL PROMPTS [OUTPUT]}
DATA=${2:?usage: $0 MODEL PROMPTS [OUTPUT]}
OUTPUT=${3:-runs/skywork_or1}
GPUS=${GPUS:-8}
PROMPTS=${PROMPTS_PER_ITERATION:-256}
SAMPLES=${SAMPLES:-16}

for LENGTH in ${STAGES:-8192 16384 32768}; do
  STAGE=$OUTPUT/$LENGTH
  MAX_LEN=$((LENGTH + ${PROMPT_LEN:-2048}))
  RANKS=$((MAX_LEN > ${LONGEST_ALONE:-20000} && GPUS > 1 ? 2 : 1))
  if [ ! -d "$STAGE/model" ]; then
    rlhf grpo --pretrain "$MODEL" --prompt_data "$DATA" --output "$STAGE" --load_checkpoint \
      --max_new_tokens "$LENGTH" --max_len "$MAX_LEN" \
      --sequence_parallel_size "$RANKS" --train_max_tokens_per_gpu "$(((MAX_LEN + RANKS - 1) / RANKS))" \
      --reward_funcs math --dynamic_filtering --init_kl_coef 0 \
      --entropy_target 0.2 --entropy_delta 1e-4 --entropy_max 5e-3 \
      --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$SAMPLES" --train_batch_size "$((PROMPTS * SAMPLES))" \
      --max_iterations "${ITERATIONS:-300}" --num_episodes 100 --actor_learning_rate 1e-6 \
      --zero_stage 3 --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" \
      --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep \
      --gradient_checkpointing --save_steps 10 ${FLAGS:-}
  fi
  MODEL=$STAGE
done
