#!/usr/bin/env bash
# Rejection-sampling fine-tuning: samples several answers per problem, and fine-tunes the model on the right ones.
#   1. generate: SAMPLES answers per problem; keeps those with the right number after ####, without duplicates
#   2. sft on the selected answers
#
#   examples/gsm8k/rejection_sampling.sh MODEL gsm8k_train.jsonl [OUTPUT]
#
# MODEL               folder, run of `rlhf sft`, or Hugging Face name; some of its answers must already be right
# gsm8k_train.jsonl   rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT              folder for both runs (default runs/rejection_sampling); earlier runs in it are resumed
#
# For other rewards, use --reward_funcs boxed, --reward_func FILE.py, or --reward_pretrain REWARD_MODEL with a matching
# --min_score. --select best keeps only the best answer per problem.
#
# Environment variables, with defaults for a small model on one machine (large model in parentheses):
#   SAMPLES 4 (16)  CHUNK 64 prompts at a time (1024)  ENGINES 1 (GPUs / GPU_PER_ENGINE)  GPU_PER_ENGINE 1 (4)
#   RANKS 1 (number of GPUs)  ZERO_STAGE 2 (3)  MAX_NEW_TOKENS 160 (1024)  MAX_LEN 512 (2048)
#   LEARNING_RATE 1e-4 (1e-6)  EPOCHS 2  BATCH 32 (128)
set -euo pipefail

MODEL=${1:?usage: $0 MODEL gsm8k_train.jsonl [OUTPUT]}
DATA=${2:?usage: $0 MODEL gsm8k_train.jsonl [OUTPUT]}
OUTPUT=${3:-runs/rejection_sampling}
MAX_LEN=${MAX_LEN:-512}

rlhf generate --pretrain "$MODEL" --prompt_data "$DATA" --output "$OUTPUT/answers" --load_checkpoint \
  --reward_funcs gsm8k --select all --min_score 1 \
  --n_samples_per_prompt "${SAMPLES:-4}" --temperature 0.8 --rollout_batch_size "${CHUNK:-64}" \
  --max_new_tokens "${MAX_NEW_TOKENS:-160}" --max_len "$MAX_LEN" \
  --vllm_num_engines "${ENGINES:-1}" --vllm_tensor_parallel_size "${GPU_PER_ENGINE:-1}"

if [ ! -d "$OUTPUT/sft/model" ]; then
  rlhf sft --pretrain "$MODEL" --dataset "$OUTPUT/answers/selected.jsonl" --output "$OUTPUT/sft" --load_checkpoint \
    --num_processes "${RANKS:-1}" --zero_stage "${ZERO_STAGE:-2}" --max_len "$MAX_LEN" \
    --max_epochs "${EPOCHS:-2}" --train_batch_size "${BATCH:-32}" --learning_rate "${LEARNING_RATE:-1e-4}"
fi

echo "The model is in $OUTPUT/sft/model, what it was trained on is $OUTPUT/answers/selected.jsonl"
