#!/usr/bin/env bash
# PPO on the nodes of a Slurm job: Ray's head and the run on the first node, workers on the others. All end with it.
#
#   sbatch --nodes 4 --gpus-per-node 8 --time 24:00:00 examples/scripts/slurm_ppo.sh MODEL PROMPTS OUTPUT
#
# MODEL, PROMPTS, OUTPUT  paths in a file system that all nodes share, like this folder and the Python environment
#
# The same command, or a requeued job, resumes from the newest checkpoint in OUTPUT. Five minutes before the time limit,
# Slurm sends SIGTERM: the run finishes its iteration and saves. Access to the cluster requires the token in OUTPUT. For
# tested hardware, see docs/status.md.
#SBATCH --job-name rlhf-ppo
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal B:TERM@300
# The run plans with the nodes that have joined when it starts.
set -euo pipefail

USAGE="usage: sbatch --nodes N --gpus-per-node G $0 MODEL PROMPTS OUTPUT"
MODEL=${1:?$USAGE}
PROMPTS=${2:?$USAGE}
OUTPUT=${3:?$USAGE}
NODES=${SLURM_JOB_NUM_NODES:?$USAGE}
GPUS=${SLURM_GPUS_ON_NODE:?$USAGE}
HEAD=$(hostname):${RAY_PORT:-6379}

mkdir -p "$OUTPUT"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$OUTPUT/ray_token RAY_USAGE_STATS_ENABLED=0
[ -e "$RAY_AUTH_TOKEN_PATH" ] || (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

trap 'kill $(jobs -p) 2>/dev/null || true; ray stop >/dev/null' EXIT
ray start --head --port "${HEAD#*:}" --include-dashboard false
if [ "$NODES" -gt 1 ]; then
  srun --nodes "$((NODES - 1))" --ntasks "$((NODES - 1))" --exclude "$(hostname)" \
    ray start --address "$HEAD" --block &
fi

# The run plans with the nodes that have joined when it starts.
export RAY_ADDRESS=$HEAD
python - "$NODES" <<'PYTHON'
import sys, time
import ray

ray.init(logging_level="error")
deadline = time.monotonic() + 300
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    if time.monotonic() > deadline:
        sys.exit("not all nodes have joined the Ray cluster within 5 minutes")
    time.sleep(1)
PYTHON

rlhf ppo --pretrain "$MODEL" --prompt_data "$PROMPTS" --output "$OUTPUT" --load_checkpoint --save_steps 10 \
  --reward_funcs gsm8k --rollout_batch_size 128 --n_samples_per_prompt 8 --max_new_tokens 1024 --max_len 2048 \
  --train_batch_size 256 --zero_stage 3 --gradient_checkpointing \
  --actor_num_nodes "$NODES" --actor_num_gpus_per_node "$GPUS" \
  --critic_num_nodes "$NODES" --critic_num_gpus_per_node "$GPUS" \
  --ref_num_nodes "$NODES" --ref_num_gpus_per_node "$GPUS" \
  --vllm_num_engines "$((NODES * GPUS))" --vllm_gpu_memory_utilization 0.5 \
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep &
RUN=$!
trap 'kill -TERM $RUN' TERM
status=0
wait $RUN || status=$?
if [ "$status" -eq 143 ]; then # Slurm's signal ended the wait: the run is about to save
  status=0
  wait $RUN || status=$?
fi
exit "$status"
