#!/usr/bin/env bash
# Iterative DPO: in every round the model of the round before answers all problems several times, and is trained to
# prefer its best answer to its worst.
#   round N: 1. generate: SAMPLES answers to each problem, scored; problems whose answers score alike give no pair
#            2. dpo: the model of round N - 1, which is the reference too, on the pairs
#
#   examples/scripts/iterative_dpo.sh MODEL gsm8k_train.jsonl [OUTPUT]
#
# MODEL               a folder, a run of `rlhf sft`, or a Hugging Face name; some answers should be right, some wrong
# gsm8k_train.jsonl   lines with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT              folder of all rounds; runs/iterative_dpo by default. What is there is continued.
#
# Other scores: --reward_funcs boxed, --reward_func FILE.py, or --reward_pretrain REWARD_MODEL instead of the verifier.
#
# From the environment, for a small model on one machine; a large one takes what stands in brackets:
#   ROUNDS 2 (3)  SAMPLES 4 (16)  CHUNK 64 prompts at a time (1024)
#   ENGINES 1 (one for each GPU_PER_ENGINE GPUs)  GPU_PER_ENGINE 1 (4)  RANKS 1 (GPUs of the machine)  ZERO_STAGE 2 (3)
#   MAX_NEW_TOKENS 160 (1024)  MAX_LEN 512 (2048)  LEARNING_RATE 1e-5 (5e-7)  BETA 0.1  NLL 1 (the part that keeps the
#   probability of chosen answers from falling)  BATCH 32 (128)
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
