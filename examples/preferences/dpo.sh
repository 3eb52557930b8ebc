#!/usr/bin/env bash
# Preference training on pairs of the model's own answers, in minutes on two idle CPU cores:
#   1. writes requests for a sentence of exactly eight words (examples/eight_words/eight_words.py)
#   2. generate: eight answers per request; the best and the worst by reward become a pair
#   3. dpo on all pairs except the last eight, which are held out
#   4. compare: the model before and after, with sampled answers to held-out requests
#
#   examples/preferences/dpo.sh MODEL [OUTPUT]
#
# MODEL    folder, GGUF file, run, or Hugging Face name, such as HuggingFaceTB/SmolLM2-135M-Instruct
# OUTPUT   folder for data and runs (default runs/preferences); earlier runs in it are resumed
#
# Environment variables and their defaults: SAMPLES 8 answers per request, EPOCHS 3, LEARNING_RATE 2e-5, BETA 0.1,
#   MAX_NEW_TOKENS 48, FLAGS (more flags for dpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [OUTPUT]}
OUTPUT=${2:-runs/preferences}
SAMPLES=${SAMPLES:-8}
REWARD=$(dirname "$0")/../eight_words/eight_words.py
ANSWERS=(--reward_func "$REWARD" --n_samples_per_prompt "$SAMPLES" --max_new_tokens "${MAX_NEW_TOKENS:-48}" --max_len 128)

mkdir -p "$OUTPUT"
python3 "$REWARD" "$OUTPUT/train.jsonl" "$OUTPUT/eval.jsonl"

rlhf generate --pretrain "$MODEL" --prompt_data "$OUTPUT/train.jsonl" --output "$OUTPUT/answers" --load_checkpoint \
  --select best_worst "${ANSWERS[@]}"
head -n -8 "$OUTPUT/answers/selected.jsonl" >"$OUTPUT/pairs.jsonl"
tail -n 8 "$OUTPUT/answers/selected.jsonl" >"$OUTPUT/pairs_eval.jsonl"

rlhf dpo --pretrain "$MODEL" --dataset "$OUTPUT/pairs.jsonl" --eval_dataset "$OUTPUT/pairs_eval.jsonl" \
  --output "$OUTPUT/dpo" --load_checkpoint --max_len 128 --train_batch_size 8 --max_epochs "${EPOCHS:-3}" \
  --learning_rate "${LEARNING_RATE:-2e-5}" --beta "${BETA:-0.1}" --eval_steps 3 ${FLAGS:-}

rlhf compare "$MODEL" "$OUTPUT/dpo" --prompt_data "$OUTPUT/eval.jsonl" --output "$OUTPUT/compare" \
  --temperature 1 "${ANSWERS[@]}"
