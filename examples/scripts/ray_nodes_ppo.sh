#!/usr/bin/env bash
# PPO on several machines in one Ray cluster that you start manually. Run it on every machine:
#
#   examples/scripts/ray_nodes_ppo.sh head                                    # on the first; prints the next commands
#   examples/scripts/ray_nodes_ppo.sh worker HEAD_ADDRESS                     # on each other machine
#   examples/scripts/ray_nodes_ppo.sh submit MODEL PROMPTS OUTPUT [NODES]     # on the first, after all have joined
#   examples/scripts/ray_nodes_ppo.sh stop                                    # on every machine, at the end
#
# HEAD_ADDRESS  address of the first machine in the cluster's network; the port is RAY_PORT (6379)
# MODEL, PROMPTS, OUTPUT  paths in a file system that all machines share; an earlier run in OUTPUT is resumed
# NODES         number of machines, each with GPUS_PER_NODE (8) GPUs; default 2
#
# Access to the cluster requires the token in ~/.ray/auth_token: `head` creates it; copy it to the other machines. The
# job server listens only on 127.0.0.1 of the first machine. Actor, critic, reference and engines share all GPUs. For
# tested hardware, see docs/status.md.
set -euo pipefail

USAGE="usage: $0 head | worker HEAD_ADDRESS | submit MODEL PROMPTS OUTPUT [NODES] | stop"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
PORT=${RAY_PORT:-6379}
GPUS=${GPUS_PER_NODE:-8}

case "${1:?$USAGE}" in
head)
  [ -e ~/.ray/auth_token ] || ray get-auth-token --generate >/dev/null
  ray start --head --port "$PORT" --dashboard-host 127.0.0.1 --dashboard-port 8265
  echo "Copy ~/.ray/auth_token to the other machines, and start there: $0 worker $(hostname -I | cut -d ' ' -f 1)"
  ;;
worker)
  ray start --address "${2:?$USAGE}:$PORT"
  ;;
submit)
  NODES=${5:-2}
  ray job submit --address http://127.0.0.1:8265 -- rlhf ppo \
    --pretrain "${2:?$USAGE}" --prompt_data "${3:?$USAGE}" --output "${4:?$USAGE}" --load_checkpoint --save_steps 10 \
    --reward_funcs gsm8k --rollout_batch_size 128 --n_samples_per_prompt 8 --max_new_tokens 1024 --max_len 2048 \
    --train_batch_size 256 --zero_stage 3 --gradient_checkpointing \
    --actor_num_nodes "$NODES" --actor_num_gpus_per_node "$GPUS" \
    --critic_num_nodes "$NODES" --critic_num_gpus_per_node "$GPUS" \
    --ref_num_nodes "$NODES" --ref_num_gpus_per_node "$GPUS" \
    --vllm_num_engines "$((NODES * GPUS))" --vllm_gpu_memory_utilization 0.5 \
    --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
  ;;
stop)
  ray stop
  ;;
*)
  echo "$USAGE" >&2
  exit 2
  ;;
esac
