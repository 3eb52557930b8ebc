#!/usr/bin/env bash
# Trains an untrained 11M model on GSM8K with sft and ppo, on a CPU or a GPU, without any download:
#   1. scratch: a tokenizer and an untrained Qwen2, from the text of the problems
#   2. sft on the worked solutions
#   3. ppo with a critic; the verifier gsm8k compares the number after ####
# A model of this size learns the form of solutions, but little arithmetic. The script shows all parts on real text.
#
#   examples/gsm8k/sft_ppo.sh gsm8k_train.jsonl [OUTPUT]
#
# gsm8k_train.jsonl   rows with "question" and "answer", as published with GSM8K (openai/grade-school-math)
# OUTPUT              folder for the model and both runs (default runs/gsm8k); earlier runs in it are resumed
#
# Environment variables and their defaults: SFT_STEPS 200, PPO_ITERATIONS 5, ROLLOUT_BATCH_SIZE 32 prompts with 4
# responses each, MAX_NEW_TOKENS 160, PARAM_DTYPE bf16 (fp32 is many times faster on CPUs without bf16 instructions).
set -euo pipefail

DATA=${1:?usage: $0 gsm8k_train.jsonl [OUTPUT]}
OUTPUT=${2:-runs/gsm8k}
DTYPE=${PARAM_DTYPE:-bf16}
PROMPTS=${ROLLOUT_BATCH_SIZE:-32}

if [ ! -d "$OUTPUT/untrained" ]; then
  mkdir -p "$OUTPUT"
  rlhf scratch --dataset "$DATA" --vocab_size 4096 --intermediate_size 1408 --output "$OUTPUT/untrained"
fi

rlhf sft --pretrain "$OUTPUT/untrained" --dataset "$DATA" --output "$OUTPUT/sft" --load_checkpoint \
  --param_dtype "$DTYPE" --max_epochs 10 --max_steps "${SFT_STEPS:-200}" --train_batch_size 64 --max_len 512 \
  --learning_rate 2e-3 --adam_betas 0.9 0.95 --save_steps 50

rlhf ppo --pretrain "$OUTPUT/sft" --prompt_data "$DATA" --output "$OUTPUT/ppo" --load_checkpoint \
  --param_dtype "$DTYPE" --reward_funcs gsm8k --rollout_batch_size "$PROMPTS" --n_samples_per_prompt 4 \
  --max_iterations "${PPO_ITERATIONS:-5}" --max_new_tokens "${MAX_NEW_TOKENS:-160}" --max_len 512 \
  --train_batch_size "$((2 * PROMPTS))" --actor_learning_rate 1e-5 --critic_learning_rate 5e-5 --init_kl_coef 0.01 \
  --colocate_all_models --save_steps 5

echo "The model is in $OUTPUT/ppo/model, the reports are $OUTPUT/sft/report.html and $OUTPUT/ppo/report.html"
