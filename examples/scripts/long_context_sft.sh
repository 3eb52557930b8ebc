#!/usr/bin/env bash
# Fine-tunes on conversations and documents of up to 128k tokens. Eight GPUs share each sequence, 16k tokens per GPU.
# Shorter rows are packed up to the same length.
#
#   examples/scripts/long_context_sft.sh MODEL DATA [OUTPUT]
#
# MODEL    model with enough positions: folder or Hugging Face name (meta-llama/Llama-3.1-8B-Instruct)
# DATA     conversations, or prompts with responses: file, folder or Hugging Face name
# OUTPUT   run directory (default runs/long_context_sft); an earlier run in it is resumed
#
# Environment variables and their defaults: GPUS 8 (on one machine), MAX_LEN 131072, RANKS_PER_SEQUENCE (all GPUs),
# TRAIN_BATCH_SIZE 32, FLAGS (more flags for sft). If RANKS_PER_SEQUENCE does not divide the heads, ranks gather keys
# instead of exchanging heads, which needs more memory.
set -euo pipefail

MODEL=${1:?usage: $0 MODEL DATA [OUTPUT]}
DATA=${2:?usage: $0 MODEL DATA [OUTPUT]}
OUTPUT=${3:-runs/long_context_sft}
GPUS=${GPUS:-8}
RANKS=${RANKS_PER_SEQUENCE:-$GPUS}
MAX_LEN=${MAX_LEN:-131072}

rlhf sft --pretrain "$MODEL" --dataset "$DATA" --output "$OUTPUT" --load_checkpoint --num_processes "$GPUS" \
  --max_len "$MAX_LEN" --sequence_parallel_size "$RANKS" --train_max_tokens_per_gpu "$(((MAX_LEN + RANKS - 1) / RANKS))" \
  --train_batch_size "${TRAIN_BATCH_SIZE:-32}" --learning_rate 1e-5 \
  --zero_stage 3 --gradient_checkpointing --save_steps 100 ${FLAGS:-}
