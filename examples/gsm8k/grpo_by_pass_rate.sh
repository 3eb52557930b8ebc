#!/usr/bin/env bash
# GRPO on problems from which the model can learn: those that it solves sometimes, but not always.
#   1. eval: SAMPLES answers per problem; writes the share of right ones into each row
#   2. grpo on problems with a share from 0.1 to 0.9, evaluated on held-out problems; keeps the best model
#   3. eval: the model before and after, and the best model, in one table
#
#   examples/gsm8k/grpo_by_pass_rate.sh MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]
#
# MODEL           folder, run of `rlhf sft`, or Hugging Face name; some of its answers must already be right
# gsm8k_*.jsonl   rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT          folder for the runs (default runs/grpo_by_pass_rate); earlier runs in it are resumed
#
# Environment variables, with defaults for a small model on one machine (large model in parentheses):
#   SAMPLES 4 (16)  PROMPTS 16 per iteration (128)  GROUP 4 responses per prompt (16)  ITERATIONS 5 (200)
#   EVAL_STEPS 5 (20)  EVAL_ROWS 64 (1319)  MAX_NEW_TOKENS 160 (1024)  MAX_LEN 512 (2048)  LEARNING_RATE 1e-5 (1e-6)
#   ENGINES 1 (number of GPUs)
set -euo pipefail

MODEL=${1:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
TRAIN=${2:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
TEST=${3:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
OUTPUT=${4:-runs/grpo_by_pass_rate}
MAX_LEN=${MAX_LEN:-512}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-160}
PROMPTS=${PROMPTS:-16}
GROUP=${GROUP:-4}

mkdir -p "$OUTPUT"
rlhf eval --pretrain "$MODEL" --prompt_data "$TRAIN" --reward_funcs gsm8k --output "$OUTPUT/rates" --load_checkpoint \
  --n_samples_per_prompt "${SAMPLES:-4}" --temperature 1 --write_pass_rate "$OUTPUT/rates.jsonl" \
  --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" --vllm_num_engines "${ENGINES:-1}"

if [ ! -d "$OUTPUT/grpo/model" ]; then
  rlhf grpo --pretrain "$MODEL" --prompt_data "$OUTPUT/rates.jsonl" --label_key answer --reward_funcs gsm8k \
    --pass_rate_range 0.1 0.9 --num_episodes 100 --output "$OUTPUT/grpo" --load_checkpoint \
    --eval_dataset "$TEST" --eval_max_samples "${EVAL_ROWS:-64}" --eval_steps "${EVAL_STEPS:-5}" \
    --best_metric_key eval/accuracy --save_steps "${EVAL_STEPS:-5}" --max_iterations "${ITERATIONS:-5}" \
    --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$GROUP" --train_batch_size "$((PROMPTS * GROUP))" \
    --actor_learning_rate "${LEARNING_RATE:-1e-5}" --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" \
    --vllm_num_engines "${ENGINES:-1}" --colocate_all_models
fi

rlhf eval --pretrain "$MODEL,$OUTPUT/grpo,$OUTPUT/grpo/best" --prompt_data "$TEST" --reward_funcs gsm8k \
  --max_samples "${EVAL_ROWS:-64}" --output "$OUTPUT/result" --load_checkpoint \
  --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" --vllm_num_engines "${ENGINES:-1}"
