#!/usr/bin/env bash
# Skywork-OR1 (arXiv 2505.22312): GRPO on math problems in stages of growing response length, with an entropy bonus that
# keeps the entropy at a target, no KL divergence, and without groups that are all right or all wrong. In the stage with
# 32k tokens, two GPUs share each sequence.
#
#   examples/scripts/skywork_or1.sh MODEL PROMPTS [OUTPUT]
#
# MODEL     reasoning model: folder or Hugging Face name (deepseek-ai/DeepSeek-R1-Distill-Qwen-7B)
# PROMPTS   problems with answers: file, folder or Hugging Face name
# OUTPUT    folder for the stages (default runs/skywork_or1); earlier stages in it are resumed
#
# Environment variables and their defaults: STAGES "8192 16384 32768" (tokens per response), ITERATIONS 300 per stage,
# GPUS 8, PROMPTS_PER_ITERATION 256, SAMPLES 16, PROMPT_LEN 2048, LONGEST_ALONE 20000 (two GPUs share longer sequences),
# FLAGS (more flags for grpo).
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
