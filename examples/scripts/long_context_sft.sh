#!/usr/bin/env bash
# Fine-tuning on conversations and documents of 128k tokens: eight GPUs share each sequence, so that each of them has 16k
# tokens of it. Shorter rows are packed together up to the same number.
#
#   examples/scripts/long_context_sft.sh MODEL DATA [OUTPUT]
#
# MODEL    a model with as many positions: a folder or a Hugging Face name (meta-llama/Llama-3.1-8B-Instruct)
# DATA     conversations, or prompts with responses: a file, a folder or a Hugging Face name
# OUTPUT   run directory; runs/long_context_sft by default. A run that is there is continued.
#
# From the environment: GPUS 8 (on one machine), MAX_LEN 131072, RANKS_PER_SEQUENCE (all GPUs), TRAIN_BATCH_SIZE 32,
# FLAGS (further flags of `rlhf sft`). A model whose heads RANKS_PER_SEQUENCE does not divide gathers keys instead of
# exchanging heads, which takes more memory.
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
