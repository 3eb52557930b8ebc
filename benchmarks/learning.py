"""Learning curves of presets, advantages and losses of grpo and ppo.

python benchmarks/learning.py train --folder runs --seeds 3    # except for runs that are finished
python benchmarks/learning.py table --folder runs
python benchmarks/learning.py train --folder runs --task episodes

All runs train in this process without Ray. Tasks:

- sums: prompts from `rlhf quickstart --seed 1`, starting with the model that imitates demonstrations, as in alarms.py.
  12 iterations, each with 32 prompts, 4 responses per prompt and two optimizer steps.
- episodes: the game in test_async_repeats.py, starting with a random model. The second turn repeats the parity of an
  observation. 60 iterations, each with 4 prompts, 8 episodes per prompt and one optimizer step.
"""

import sys
import time
from pathlib import Path
from statistics import fmean

from alarms import Fault, prepare, train_here
from common import machine, make_parser, table

from rlhf_cli.backends.training.distributed import join_process_group, leave_process_group
from rlhf_cli.tracking.sinks import MetricsFile, read_metrics

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "helpers"), str(TESTS / "unit" / "trainers")]

LAST = {"sums": 3, "episodes": 5}
"""Final iterations in the last column of the table, by task."""
CRITIC = {"critic_learning_rate": "5e-4"}
NO_KL = {"init_kl_coef": "0"}
METHODS: dict[str, dict[str, str]] = {
    "grpo": {},
    "grpo --init_kl_coef 0": NO_KL,
    "grpo --preset online_dpo": {"preset": "online_dpo", "init_kl_coef": "0.1"},
    "grpo --preset vespo": {"preset": "vespo", **NO_KL},
    "grpo --preset dppo": {"preset": "dppo", **NO_KL},
    "grpo --preset gmpo": {"preset": "gmpo", **NO_KL},
    "grpo --preset luspo": {"preset": "luspo", **NO_KL},
    "grpo --advantage maxrl": {"advantage": "maxrl"},
    "grpo --policy_loss dppo_kl": {"policy_loss": "dppo_kl"},
    "grpo --policy_loss topr": {"policy_loss": "topr"},
    "grpo --policy_loss clip_cov": {"policy_loss": "clip_cov"},
    "grpo --policy_loss kl_cov": {"policy_loss": "kl_cov"},
    "grpo --advantage_std batch --loss_agg token_mean": {"advantage_std": "batch", "loss_agg": "token_mean"},
    "grpo --loss_agg prompt_mean": {"loss_agg": "prompt_mean"},
    "grpo --top_entropy_quantile 0.2": {"top_entropy_quantile": "0.2"},
    "grpo --correct_nll_coef 0.1": {"correct_nll_coef": "0.1"},
    "ppo": {},
    "ppo --correct_nll_coef 0.1": {"correct_nll_coef": "0.1"},
    "ppo --preset vapo": {"preset": "vapo", **NO_KL},
    "ppo --preset vapo --lambd_alpha 2": {"preset": "vapo", "lambd_alpha": "2", **NO_KL},
}
"""Settings by flags. The settings of `alarms.GRPO` are explicit, so presets repeat the KL coefficient here."""
ON_EPISODES: dict[str, dict[str, str]] = {
    "grpo": {},
    "grpo --advantage gigpo": {"advantage": "gigpo"},
    "grpo --observation_nll_coef 0.05": {"observation_nll_coef": "0.05"},
    "grpo --observation_nll_coef 0.5": {"observation_nll_coef": "0.5"},
    "grpo --advantage maxrl": {"advantage": "maxrl"},
    "grpo --preset online_dpo --init_kl_coef 0.001": {"preset": "online_dpo"},
    "ppo": {},
}
"""The same for episodes."""
TASKS = {"sums": METHODS, "episodes": ON_EPISODES}


def run_folder(root: Path, task: str, method: str, seed: int) -> Path:
    name = "learning" if task == "sums" else f"learning_{task}"
    return root / name / method.replace(" --", "-").replace(" ", "_") / str(seed)


def train(root: Path, task: str, num_seeds: int) -> None:
    """Train all runs that are not finished, all methods of a seed before the next seed."""
    for seed in range(1, num_seeds + 1):
        for method, settings in TASKS[task].items():
            folder = run_folder(root, task, method, seed)
            if (folder / "done").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            command, *_ = method.split()
            began = time.process_time()
            if task == "sums":
                train_here(root, folder, Fault(settings | CRITIC if command == "ppo" else settings), seed, command)
            else:
                play(root, folder, command, settings | {"seed": str(seed)})
            (folder / "done").touch()
            print(f"{method} seed {seed}: {time.process_time() - began:.0f} CPU s", flush=True)


def play(root: Path, folder: Path, command: str, settings: dict[str, str]) -> None:
    """Train on episodes and write metrics.jsonl."""
    from conftest import save_tiny_model
    from test_online_repeats import Parts, WorthOfEpisodes, episode_prompts, episodes_config, play_parity
    from test_online_repeats import train as train_here

    model = root / "tiny"
    if not model.exists():
        save_tiny_model(model)
    config = episodes_config(command, str(model), **settings)
    parts = Parts(play_parity, WorthOfEpisodes([], fails=lambda index: False))
    logged, _, _ = train_here(config, config.estimator, folder, episode_prompts(240), parts=parts, iterations=60)
    file = MetricsFile(folder, resume_step=None)
    for step, metrics in logged:
        file.log(step, metrics)


def print_table(root: Path, task: str) -> None:
    """Print the mean reward over all iterations and over the last ones, by seed."""
    print(f"{machine()}\n")
    rows = []
    for method in TASKS[task]:
        folders = sorted(done.parent for done in run_folder(root, task, method, 0).parent.glob("*/done"))
        curves = [[row["reward"] for _, row in sorted(read_metrics(folder).items())] for folder in folders]
        whole, last = (
            ", ".join(f"{fmean(curve[part]):.2f}" for curve in curves)
            for part in (slice(None), slice(-LAST[task], None))
        )
        rows.append((f"`{method}`", whole, last))
    print(table(f"method | all iterations | last {LAST[task]}", rows))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=["train", "table"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.action == "table":
        print_table(args.folder, args.task)
        return
    if args.task == "sums":
        prepare(args.folder)
    join_process_group()
    train(args.folder, args.task, args.seeds)
    leave_process_group()


if __name__ == "__main__":
    main()
