#!/usr/bin/env bash
# Trains an untrained 11M model on GSM8K with sft, then on right and wrong solutions, with dpo and with kto:
#   1. scratch: a tokenizer and an untrained Qwen2, from the text of the problems
#   2. sft on the worked solutions
#   3. dpo on pairs of a right and a wrong solution to the same problem, written by other models
#   4. kto on the same solutions, each labelled right or wrong
# Both are evaluated on held-out questions, where the margin starts at 0. A model of this size is hardly better than
# chance. The published solutions belong to GSM8K's test problems, so do not evaluate the policy on them.
#
#   examples/gsm8k/sft_dpo_kto.sh gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]
#
# gsm8k_train.jsonl      rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# gsm8k_solutions.jsonl  rows with "question" and labelled solutions: example_model_solutions.jsonl from the same source
# OUTPUT                 folder for models, pairs and runs (default runs/gsm8k_preferences); earlier runs are resumed
#
# Environment variables and their defaults: SFT_STEPS 200, STEPS 40 for dpo and for kto, PARAM_DTYPE bf16 (fp32 is many
# times faster on CPUs without bf16 instructions).
set -euo pipefail

DATA=${1:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
SOLUTIONS=${2:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
OUTPUT=${3:-runs/gsm8k_preferences}
DTYPE=${PARAM_DTYPE:-bf16}

mkdir -p "$OUTPUT"
if [ ! -d "$OUTPUT/untrained" ]; then
  rlhf scratch --dataset "$DATA" --vocab_size 4096 --intermediate_size 1408 --output "$OUTPUT/untrained"
fi
python "$(dirname "$0")/pairs.py" "$SOLUTIONS" "$OUTPUT/pairs.jsonl" "$OUTPUT/pairs_eval.jsonl"

rlhf sft --pretrain "$OUTPUT/untrained" --dataset "$DATA" --output "$OUTPUT/sft" --load_checkpoint \
  --param_dtype "$DTYPE" --max_epochs 10 --max_steps "${SFT_STEPS:-200}" --train_batch_size 64 --max_len 512 \
  --learning_rate 2e-3 --adam_betas 0.9 0.95 --save_steps 50

rlhf dpo --pretrain "$OUTPUT/sft" --dataset "$OUTPUT/pairs.jsonl" --eval_dataset "$OUTPUT/pairs_eval.jsonl" \
  --param_dtype "$DTYPE" --output "$OUTPUT/dpo" --load_checkpoint --max_epochs 2 --max_steps "${STEPS:-40}" \
  --train_batch_size 32 --max_len 512 --learning_rate 1e-4 --eval_steps 10 --save_steps 10

rlhf kto --pretrain "$OUTPUT/sft" --dataset "$OUTPUT/pairs.jsonl" --eval_dataset "$OUTPUT/pairs_eval.jsonl" \
  --param_dtype "$DTYPE" --output "$OUTPUT/kto" --load_checkpoint --max_epochs 2 --max_steps "${STEPS:-40}" \
  --train_batch_size 32 --max_len 512 --learning_rate 1e-4 --eval_steps 10 --save_steps 10

echo "The models are in $OUTPUT/dpo/model and $OUTPUT/kto/model, the reports are report.html in each run's folder"
