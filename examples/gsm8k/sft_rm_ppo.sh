#!/usr/bin/env bash
# Trains an untrained 11M model and a reward model on GSM8K, then ppo with both verifier and reward model:
#   1. scratch: a tokenizer and an untrained Qwen2, from the text of the problems
#   2. sft on the worked solutions
#   3. rm on pairs of a right and a wrong solution to the same problem, written by other models
#   4. ppo; the reward is 1 for a right number after ####, plus the weighted score of the reward model
# A reward model of this size is hardly better than chance. The script shows all parts on real text. The published
# solutions belong to GSM8K's test problems, so do not evaluate the policy on them. Nothing is downloaded.
#
#   examples/gsm8k/sft_rm_ppo.sh gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]
#
# gsm8k_train.jsonl      rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# gsm8k_solutions.jsonl  rows with "question" and labelled solutions: example_model_solutions.jsonl from the same source
# OUTPUT                 folder for models, pairs and runs (default runs/gsm8k_rm); earlier runs in it are resumed
#
# Environment variables and their defaults: SFT_STEPS 200, RM_STEPS 60, PPO_ITERATIONS 5, ROLLOUT_BATCH_SIZE 32 prompts
# with 4 responses each, MAX_NEW_TOKENS 160, PARAM_DTYPE bf16 (fp32 is many times faster on CPUs without bf16).
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
python "$(dirname "$0")/pairs.py" "$SOLUTIONS" "$OUTPUT/pairs.jsonl" "$OUTPUT/pairs_eval.jsonl"

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
