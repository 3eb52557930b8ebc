#!/usr/bin/env bash
# GRPO that a laptop can watch learning: answers of exactly eight words from a model of 135M parameters.
#   1. prompts about forty things, eight of them for evaluation (eight_words.py, which is the reward file too)
#   2. grpo: the share of answers with exactly eight words is reward_func/exact in metrics.jsonl and in the report
#
#   examples/scripts/eight_words_grpo.sh MODEL [OUTPUT]
#
# MODEL               a folder, a GGUF file, a run, or a Hugging Face name, such as HuggingFaceTB/SmolLM2-135M-Instruct
# OUTPUT              folder of prompts and run; runs/eight_words by default. What is there is continued.
#
# From the environment: PROMPTS 8 an iteration  GROUP 8 answers to each  ITERATIONS 40  LEARNING_RATE 2e-5
#   MAX_NEW_TOKENS 48  and FLAGS (further flags of the command).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [OUTPUT]}
OUTPUT=${2:-runs/eight_words}
PROMPTS=${PROMPTS:-8}
GROUP=${GROUP:-8}
REWARD=$(dirname "$0")/eight_words.py

mkdir -p "$OUTPUT"
python3 "$REWARD" "$OUTPUT/train.jsonl" "$OUTPUT/eval.jsonl"

rlhf grpo --pretrain "$MODEL" --prompt_data "$OUTPUT/train.jsonl" --eval_dataset "$OUTPUT/eval.jsonl" \
  --reward_func "$REWARD" --output "$OUTPUT/grpo" --load_checkpoint --save_steps 20 \
  --num_episodes 1000 --max_iterations "${ITERATIONS:-40}" --eval_steps 20 \
  --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$GROUP" --train_batch_size "$((PROMPTS * GROUP))" \
  --actor_learning_rate "${LEARNING_RATE:-2e-5}" --lr_scheduler constant --init_kl_coef 0 \
  --max_new_tokens "${MAX_NEW_TOKENS:-48}" --max_len 128 ${FLAGS:-}
