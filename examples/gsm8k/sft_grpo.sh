#!/usr/bin/env bash
# Teaches a small model short word problems on two CPU cores: sft takes 22 minutes, an iteration of grpo 2.5:
#   1. selects problems with at most STEPS calculations
#   2. sft on the worked solutions, one epoch
#   3. grpo on the same problems
#   4. eval: the model before, after sft and after grpo on held-out problems, greedy, in one table
#
#   examples/gsm8k/sft_grpo.sh MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]
#
# MODEL           folder, GGUF file, run, or Hugging Face name, such as HuggingFaceTB/SmolLM2-135M-Instruct
# gsm8k_*.jsonl   rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT          folder for the runs (default runs/gsm8k); earlier runs in it are resumed
#
# Environment variables and their defaults: STEPS 2 calculations, EPOCHS 1 of sft, SFT_LEARNING_RATE 1e-4,
#   PROMPTS 32 per iteration, GROUP 8 answers per problem, ITERATIONS 12, LEARNING_RATE 2e-5, MAX_NEW_TOKENS 160,
#   MAX_LEN 512, MAX_TOKENS 4096 per micro-batch of grpo (16,192 do not fit in 24 GiB), FLAGS (more flags for grpo).
set -euo pipefail

MODEL=${1:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
TRAIN=${2:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
TEST=${3:?usage: $0 MODEL gsm8k_train.jsonl gsm8k_test.jsonl [OUTPUT]}
OUTPUT=${4:-runs/gsm8k}
PROMPTS=${PROMPTS:-32}
GROUP=${GROUP:-8}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-160}
MAX_LEN=${MAX_LEN:-512}

mkdir -p "$OUTPUT"
# A calculation is between "<<" and ">>" in the published solutions.
for part in train test; do
  file=$TRAIN
  [ "$part" = test ] && file=$TEST
  awk -v most="${STEPS:-2}" '{ row = $0 } gsub(/<</, "") <= most { print row }' "$file" > "$OUTPUT/$part.jsonl"
done

if [ ! -d "$OUTPUT/sft/model" ]; then
  rlhf sft --pretrain "$MODEL" --dataset "$OUTPUT/train.jsonl" --output "$OUTPUT/sft" --load_checkpoint \
    --max_len "$MAX_LEN" --train_batch_size 16 --max_epochs "${EPOCHS:-1}" \
    --learning_rate "${SFT_LEARNING_RATE:-1e-4}"
fi

if [ ! -d "$OUTPUT/grpo/model" ]; then
  rlhf grpo --pretrain "$OUTPUT/sft" --prompt_data "$OUTPUT/train.jsonl" --reward_funcs gsm8k \
    --output "$OUTPUT/grpo" --load_checkpoint --save_steps 4 --num_episodes 100 \
    --max_iterations "${ITERATIONS:-12}" --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$GROUP" \
    --train_batch_size "$((PROMPTS * GROUP))" --actor_learning_rate "${LEARNING_RATE:-2e-5}" \
    --lr_scheduler constant --init_kl_coef 0 --train_max_tokens_per_gpu "${MAX_TOKENS:-4096}" \
    --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" ${FLAGS:-}
fi

rlhf eval --pretrain "$MODEL,$OUTPUT/sft,$OUTPUT/grpo" --prompt_data "$OUTPUT/test.jsonl" --reward_funcs gsm8k \
  --output "$OUTPUT/result" --load_checkpoint --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN"
