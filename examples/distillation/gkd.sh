#!/usr/bin/env bash
# On-policy distillation without a reward: a student that adds wrongly learns from a teacher that adds rightly. The
# models are those of `rlhf quickstart`.
#   1. gkd: the student answers, and learns the teacher's distribution of each token
#   2. eval: student before, student after, and teacher on held-out sums
#
#   examples/distillation/gkd.sh QUICKSTART [OUTPUT]
#
# QUICKSTART   output folder of `rlhf quickstart`
# OUTPUT       folder for the runs (default runs/distillation); earlier runs in it are resumed
#
# Environment variables and their defaults: ITERATIONS 12, LEARNING_RATE 3e-4, LMBDA 1, FLAGS (more flags for gkd).
set -euo pipefail

FROM=${1:?usage: $0 QUICKSTART [OUTPUT]}
OUTPUT=${2:-runs/distillation}
ANSWERS=(--label_key answer --reward_funcs exact --max_len 64 --max_new_tokens 8)

rlhf gkd --pretrain "$FROM/sft" --teacher_pretrain "$FROM/practice" --prompt_data "$FROM/data/train.jsonl" \
  --output "$OUTPUT/gkd" --load_checkpoint --lmbda "${LMBDA:-1}" --param_dtype fp32 \
  --rollout_batch_size 256 --n_samples_per_prompt 4 --train_batch_size 256 --max_iterations "${ITERATIONS:-12}" \
  --actor_learning_rate "${LEARNING_RATE:-3e-4}" --lr_warmup_ratio 0.05 --enforce_eager "${ANSWERS[@]}" ${FLAGS:-}

rlhf eval --pretrain "$FROM/sft,$OUTPUT/gkd,$FROM/practice" --prompt_data "$FROM/data/held_out.jsonl" \
  --output "$OUTPUT/result" --load_checkpoint --rollout_backend transformers "${ANSWERS[@]}"
