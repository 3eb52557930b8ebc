#!/usr/bin/env bash
# Trains a policy and a reward model on GSM8K from nothing, on a CPU or a GPU, and lets the one judge the other:
#   1. a tokenizer and an untrained Qwen2 of 11M parameters, made from the problems themselves
#   2. fine-tuning on the worked solutions
#   3. a reward model from solutions of other models, a right one against a wrong one of the same problem
#   4. PPO, where a response is worth 1 if its number after #### is right, and what the reward model makes of it
# A model this small tells right from wrong little better than chance: what this shows is every part of the chain on
# real text. The published solutions are of GSM8K's test problems: do not measure a policy trained like this on those.
# Nothing is downloaded.
#
#   examples/scripts/gsm8k_sft_rm_ppo.sh gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]
#
# gsm8k_train.jsonl      lines with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# gsm8k_solutions.jsonl  lines with "question" and marked solutions of several models: example_model_solutions.jsonl there
# OUTPUT                 folder of models, pairs and runs; runs/gsm8k_rm by default. Runs that are there are continued.
#
# From the environment: SFT_STEPS (200), RM_STEPS (60), PPO_ITERATIONS (5), ROLLOUT_BATCH_SIZE (32 prompts, 4 responses
# each), MAX_NEW_TOKENS (160), PARAM_DTYPE (bf16; fp32 is many times faster on processors without bf16 products).
set -euo pipefail

DATA=${1:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
SOLUTIONS=${2:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
OUTPUT=${3:-runs/gsm8k_rm}
DTYPE=${PARAM_DTYPE:-bf16}
PROMPTS=${ROLLOUT_BATCH_SIZE:-32}

mkdir -p "$OUTPUT"
if [ ! -d "$OUTPUT/untrained" ]; then
  rlhf scratch --dataset "$DATA" --vocab_size 4096 --intermediate_size 1408 --output "$OUTPUT/untrained"
fi
python "$(dirname "$0")/gsm8k_pairs.py" "$SOLUTIONS" "$OUTPUT/pairs.jsonl" "$OUTPUT/pairs_eval.jsonl"

rlhf sft --pretrain "$OUTPUT/untrained" --dataset "$DATA" --output "$OUTPUT/sft" --load_checkpoint \
  --param_dtype "$DTYPE" --max_epochs 10 --max_steps "${SFT_STEPS:-200}" --train_batch_size 64 --max_len 512 \
  --learning_rate 2e-3 --adam_betas 0.9 0.95 --save_steps 50

rlhf rm --pretrain "$OUTPUT/sft" --dataset "$OUTPUT/pairs.jsonl" --eval_dataset "$OUTPUT/pairs_eval.jsonl" \
  --param_dtype "$DTYPE" --output "$OUTPUT/rm" --load_checkpoint --max_epochs 4 --max_steps "${RM_STEPS:-60}" \
  --train_batch_size 32 --max_len 512 --learning_rate 2e-4 --save_steps 20

rlhf ppo --pretrain "$OUTPUT/sft" --prompt_data "$DATA" --output "$OUTPUT/ppo" --load_checkpoint \
  --param_dtype "$DTYPE" --reward_funcs gsm8k --reward_pretrain "$OUTPUT/rm" --normalize_reward \
  --reward_model_weight 0.2 --rollout_batch_size "$PROMPTS" --n_samples_per_prompt 4 \
  --max_iterations "${PPO_ITERATIONS:-5}" --max_new_tokens "${MAX_NEW_TOKENS:-160}" --max_len 512 \
  --train_batch_size "$((2 * PROMPTS))" --actor_learning_rate 1e-5 --critic_learning_rate 5e-5 --init_kl_coef 0.01 \
  --colocate_all_models --save_steps 5

echo "The model is in $OUTPUT/ppo/model, the reports are report.html in $OUTPUT/sft, $OUTPUT/rm and $OUTPUT/ppo"
