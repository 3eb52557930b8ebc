#!/usr/bin/env bash
# Trains a policy on GSM8K from nothing, then on solutions marked right or wrong, by DPO and by KTO, on a CPU or a GPU:
#   1. a tokenizer and an untrained Qwen2 of 11M parameters, made from the problems themselves
#   2. fine-tuning on the worked solutions
#   3. DPO on solutions of other models, a right one against a wrong one of the same problem
#   4. KTO on the same solutions, each by itself
# Both are evaluated on questions held out: before the first step the margin there is 0, the model being its own
# reference. A model this small tells right from wrong little better than chance. The published solutions are of GSM8K's
# test problems: do not measure a policy trained like this on those. Nothing is downloaded.
#
#   examples/scripts/gsm8k_sft_dpo_kto.sh gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]
#
# gsm8k_train.jsonl      lines with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# gsm8k_solutions.jsonl  lines with "question" and marked solutions of several models: example_model_solutions.jsonl there
# OUTPUT                 folder of models, pairs and runs; runs/gsm8k_preferences by default. Runs there are continued.
#
# From the environment: SFT_STEPS (200), STEPS (40) of DPO and of KTO, PARAM_DTYPE (bf16; fp32 is many times faster on
# processors without bf16 products).
set -euo pipefail

DATA=${1:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
SOLUTIONS=${2:?usage: $0 gsm8k_train.jsonl gsm8k_solutions.jsonl [OUTPUT]}
OUTPUT=${3:-runs/gsm8k_preferences}
DTYPE=${PARAM_DTYPE:-bf16}

mkdir -p "$OUTPUT"
if [ ! -d "$OUTPUT/untrained" ]; then
  rlhf scratch --dataset "$DATA" --vocab_size 4096 --intermediate_size 1408 --output "$OUTPUT/untrained"
fi
python "$(dirname "$0")/gsm8k_pairs.py" "$SOLUTIONS" "$OUTPUT/pairs.jsonl" "$OUTPUT/pairs_eval.jsonl"

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
