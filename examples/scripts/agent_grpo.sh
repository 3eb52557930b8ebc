#!/usr/bin/env bash
# GRPO on multi-turn episodes with one of three environments from examples/environments:
#   search   answer questions after searching a folder of texts
#   code     write functions, and try them on examples in the sandbox before answering
#   nim      play a turn-based game against an opponent that moves at random
# The few rows show all parts; for others, set PROMPTS=FILE.jsonl. First, an episode with the first row is shown, with
# example calls instead of a model.
#
#   examples/scripts/agent_grpo.sh search|code|nim MODEL [OUTPUT]
#
# MODEL    folder, run, or Hugging Face name with tool calls in its chat template, such as Qwen/Qwen2.5-1.5B-Instruct
# OUTPUT   folder for the run and the evaluation (default runs/AGENT); an earlier run in it is resumed
#
# Environment variables, with defaults for a small model on one machine (large model in parentheses):
#   PROMPTS (the rows of the example)  PROMPTS_PER_ITERATION 8 (128)  SAMPLES 4 (16)  ITERATIONS 6 (300)  MAX_TURNS 6
#   MAX_NEW_TOKENS 256 (2048)  MAX_LEN 2048 (16384)  LEARNING_RATE 1e-5 (1e-6)  ENGINES 1 (number of GPUs)
#   TEXTS (folder to search)  FLAGS (more flags for grpo and eval)
set -euo pipefail

AGENT=${1:?usage: $0 search|code|nim MODEL [OUTPUT]}
MODEL=${2:?usage: $0 search|code|nim MODEL [OUTPUT]}
OUTPUT=${3:-runs/$AGENT}
FOLDER=$(dirname "$0")/../environments

case $AGENT in
  search) FILE=search.py ROWS=questions.jsonl FUNCTION=exact ;;
  code) FILE=coder.py ROWS=tasks.jsonl FUNCTION="code(timeout=5, memory_mb=512)" ;;
  nim) FILE=nim.py ROWS=heaps.jsonl FUNCTION=environment ;;
  *) echo "usage: $0 search|code|nim MODEL [OUTPUT]: there is no agent $AGENT" >&2 && exit 2 ;;
esac
PROMPTS=${PROMPTS:-$FOLDER/$ROWS}
PROMPTS_PER_ITERATION=${PROMPTS_PER_ITERATION:-8}
SAMPLES=${SAMPLES:-4}
REWARD=(--reward_funcs "$FUNCTION")
EPISODE=(--environment "$FOLDER/$FILE" --max_turns "${MAX_TURNS:-6}" --max_new_tokens "${MAX_NEW_TOKENS:-256}" \
  --max_len "${MAX_LEN:-2048}")

rlhf data "$PROMPTS" --for ppo --pretrain "$MODEL" "${EPISODE[@]}"

rlhf grpo --pretrain "$MODEL" --prompt_data "$PROMPTS" "${EPISODE[@]}" "${REWARD[@]}" \
  --output "$OUTPUT/grpo" --load_checkpoint --save_steps 5 --num_episodes 100 --max_iterations "${ITERATIONS:-6}" \
  --rollout_batch_size "$PROMPTS_PER_ITERATION" --n_samples_per_prompt "$SAMPLES" \
  --train_batch_size "$((PROMPTS_PER_ITERATION * SAMPLES))" --actor_learning_rate "${LEARNING_RATE:-1e-5}" \
  --vllm_num_engines "${ENGINES:-1}" --colocate_all_models ${FLAGS:-}

rlhf eval --pretrain "$MODEL,$OUTPUT/grpo" --prompt_data "$PROMPTS" "${EPISODE[@]}" "${REWARD[@]}" \
  --output "$OUTPUT/result" --load_checkpoint --n_samples_per_prompt "$SAMPLES" --temperature 1 \
  --vllm_num_engines "${ENGINES:-1}" ${FLAGS:-}
