#!/usr/bin/env bash
# Iterative DPO: in each round, the current model samples several answers per problem, and is trained to prefer the best
# answer to the worst one.
#   round N: 1. generate: SAMPLES scored answers per problem; problems with equal scores give no pair
#            2. dpo on the pairs; policy and reference are both the model of round N - 1
#
#   examples/gsm8k/iterative_dpo.sh MODEL gsm8k_train.jsonl [OUTPUT]
#
# MODEL               folder, run of `rlhf sft`, or Hugging Face name; it must have both right and wrong answers
# gsm8k_train.jsonl   rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT              folder for all rounds (default runs/iterative_dpo); earlier runs in it are resumed
#
# For other rewards, replace the verifier by --reward_funcs boxed, --reward_func FILE.py or --reward_pretrain MODEL.
#
# Environment variables, with defaults for a small model on one machine (large model in parentheses):
#   ROUNDS 2 (3)  SAMPLES 4 (16)  CHUNK 64 prompts at a time (1024)
#   ENGINES 1 (GPUs / GPU_PER_ENGINE)  GPU_PER_ENGINE 1 (4)  RANKS 1 (number of GPUs)  ZERO_STAGE 2 (3)
#   MAX_NEW_TOKENS 160 (1024)  MAX_LEN 512 (2048)  LEARNING_RATE 1e-5 (5e-7)  BETA 0.1  BATCH 32 (128)
#   NLL 1 (weight of the negative log-likelihood, which keeps chosen answers likely)
set -euo pipefail

MODEL=${1:?usage: $0 MODEL gsm8k_train.jsonl [OUTPUT]}
DATA=${2:?usage: $0 MODEL gsm8k_train.jsonl [OUTPUT]}
OUTPUT=${3:-runs/iterative_dpo}
MAX_LEN=${MAX_LEN:-512}

for ((round = 1; round <= ${ROUNDS:-2}; round++)); do
  ROUND=$OUTPUT/round_$round

  rlhf generate --pretrain "$MODEL" --prompt_data "$DATA" --output "$ROUND/answers" --load_checkpoint \
    --reward_funcs gsm8k --select best_worst --seed "$round" \
    --n_samples_per_prompt "${SAMPLES:-4}" --temperature 1.0 --rollout_batch_size "${CHUNK:-64}" \
    --max_new_tokens "${MAX_NEW_TOKENS:-160}" --max_len "$MAX_LEN" \
    --vllm_num_engines "${ENGINES:-1}" --vllm_tensor_parallel_size "${GPU_PER_ENGINE:-1}"

  if [ ! -d "$ROUND/dpo/model" ]; then
    rlhf dpo --pretrain "$MODEL" --dataset "$ROUND/answers/selected.jsonl" --output "$ROUND/dpo" --load_checkpoint \
      --num_processes "${RANKS:-1}" --zero_stage "${ZERO_STAGE:-2}" --max_len "$MAX_LEN" \
      --beta "${BETA:-0.1}" --nll_loss_coef "${NLL:-1}" \
      --train_batch_size "${BATCH:-32}" --learning_rate "${LEARNING_RATE:-1e-5}"
  fi
  MODEL=$ROUND/dpo
done

echo "The model is in $MODEL/model"
