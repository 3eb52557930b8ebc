#!/usr/bin/env bash
# Fine-tunes a small model to turn messages to a shop into tickets with four fields:
#   1. writes 120 rows for training and 40 held-out rows (tickets.py)
#   2. sft for one epoch
#   3. eval: whole tickets that are right, before and after; compare: the interval of the difference
#
#   examples/tickets/sft.sh MODEL [OUTPUT]
#
# MODEL    folder, GGUF file, run, or Hugging Face name, such as HuggingFaceTB/SmolLM2-135M-Instruct
# OUTPUT   folder for data and runs (default runs/tickets_sft); earlier runs in it are resumed
#
# Environment variables and their defaults: EPOCHS 1, LEARNING_RATE 5e-5, BATCH 8, FLAGS (more flags for sft).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [OUTPUT]}
OUTPUT=${2:-runs/tickets_sft}

python3 "$(dirname "$0")/tickets.py" "$OUTPUT/train.csv" "$OUTPUT/eval.csv"

rlhf sft --pretrain "$MODEL" --dataset "$OUTPUT/train.csv" --eval_dataset "$OUTPUT/eval.csv" \
  --input_key message --output_key ticket --output "$OUTPUT/sft" --load_checkpoint \
  --max_len 256 --train_batch_size "${BATCH:-8}" --max_epochs "${EPOCHS:-1}" \
  --learning_rate "${LEARNING_RATE:-5e-5}" --eval_steps 5 ${FLAGS:-}

rlhf eval --pretrain "$MODEL,$OUTPUT/sft" --prompt_data "$OUTPUT/eval.csv" --output "$OUTPUT/eval" --load_checkpoint \
  --input_key message --label_key ticket --reward_funcs exact --max_new_tokens 24 --max_len 256

rlhf compare "$OUTPUT/eval"
