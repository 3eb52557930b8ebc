#!/usr/bin/env bash
# GRPO on the problems that a model can learn from: those that it gets right sometimes, and not always.
#   1. eval: SAMPLES answers to each problem, and the share of right ones written beside it
#   2. grpo: on problems whose share is from 0.1 to 0.9, evaluated on held-out ones; the best model is kept
#   3. eval: the model before and after, and the best one, in one table
#
#   examples/scripts/grpo_by_pass_rate.sh MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]
#
# MODEL               a folder, a run of `rlhf sft`, or a Hugging Face name; it has to get some answers right already
# gsm8k_*.jsonl       lines with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT              folder of the runs; runs/grpo_by_pass_rate by default. What is there is continued.
#
# From the environment, for a small model on one machine; a large one takes what stands in brackets:
#   SAMPLES 4 (16)  PROMPTS 16 an iteration (128)  GROUP 4 responses to each (16)  ITERATIONS 5 (200)
#   EVAL_STEPS 5 (20)  EVAL_ROWS 64 (1319)  MAX_NEW_TOKENS 160 (1024)  MAX_LEN 512 (2048)  LEARNING_RATE 1e-5 (1e-6)
#   ENGINES 1 (one for each GPU)
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
