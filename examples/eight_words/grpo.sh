#!/usr/bin/env bash
# Trains a small model with GRPO to answer in exactly eight words, in minutes on two CPU cores:
#   1. writes prompts about forty things, eight of them held out (eight_words.py, which is also the reward file)
#   2. grpo; the share of answers with exactly eight words is reward_func/exact in metrics.jsonl and the report
#   3. compare: the model before and after, with sampled answers to the held-out prompts
#
#   examples/eight_words/grpo.sh MODEL [OUTPUT]
#
# MODEL    folder, GGUF file, run, or Hugging Face name, such as HuggingFaceTB/SmolLM2-135M-Instruct
# OUTPUT   folder for prompts and runs (default runs/eight_words); an earlier run in it is resumed
#
# Environment variables and their defaults: FUNCTION reward_func (naming_reward pays only for answers that name the
#   thing), PROMPTS 8 per iteration, GROUP 8 answers per prompt, ITERATIONS 40, LEARNING_RATE 2e-5, MAX_NEW_TOKENS 48,
#   FLAGS (more flags for grpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [OUTPUT]}
OUTPUT=${2:-runs/eight_words}
PROMPTS=${PROMPTS:-8}
GROUP=${GROUP:-8}
FILE=$(dirname "$0")/eight_words.py
REWARD=$FILE:${FUNCTION:-reward_func}

mkdir -p "$OUTPUT"
python3 "$FILE" "$OUTPUT/train.jsonl" "$OUTPUT/eval.jsonl"

rlhf grpo --pretrain "$MODEL" --prompt_data "$OUTPUT/train.jsonl" --eval_dataset "$OUTPUT/eval.jsonl" \
  --reward_func "$REWARD" --output "$OUTPUT/grpo" --load_checkpoint --save_steps 20 \
  --num_episodes 1000 --max_iterations "${ITERATIONS:-40}" --eval_steps 10 \
  --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$GROUP" --train_batch_size "$((PROMPTS * GROUP))" \
  --actor_learning_rate "${LEARNING_RATE:-2e-5}" --lr_scheduler constant --init_kl_coef 0 \
  --max_new_tokens "${MAX_NEW_TOKENS:-48}" --max_len 128 ${FLAGS:-}

rlhf compare "$MODEL" "$OUTPUT/grpo" --prompt_data "$OUTPUT/eval.jsonl" --reward_func "$REWARD" \
  --output "$OUTPUT/compare" --n_samples_per_prompt "$GROUP" --temperature 1 \
  --max_new_tokens "${MAX_NEW_TOKENS:-48}" --max_len 128
