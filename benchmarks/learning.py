"""Learning curves of presets, advantages and losses of grpo and ppo on the sums of `rlhf quickstart --seed 1`.

python benchmarks/learning.py train --folder runs --seeds 3    # except for runs that are finished
python benchmarks/learning.py table --folder runs

All runs begin with the model that imitates demonstrations, and train in this process without Ray, as in alarms.py: 12
iterations of 32 prompts with 4 responses and two optimizer steps.
"""

import time
from pathlib import Path
from statistics import fmean

from alarms import Fault, prepare, train_here
from common import machine, make_parser, table

from rlhf_cli.backends.training.distributed import join_process_group, leave_process_group
from rlhf_cli.tracking.sinks import read_metrics

LAST = 3
"""Final iterations that count as the end of a run."""
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


def run_folder(root: Path, method: str, seed: int) -> Path:
    return root / "learning" / method.replace(" --", "-").replace(" ", "_") / str(seed)


def train(root: Path, num_seeds: int) -> None:
    """Train all runs that are not finished, all methods of a seed before the next seed."""
    for seed in range(1, num_seeds + 1):
        for method, settings in METHODS.items():
            folder = run_folder(root, method, seed)
            if (folder / "done").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            command, *_ = method.split()
            began = time.process_time()
            train_here(root, folder, Fault(settings | CRITIC if command == "ppo" else settings), seed, command)
            (folder / "done").touch()
            print(f"{method} seed {seed}: {time.process_time() - began:.0f} CPU s", flush=True)


def print_table(root: Path) -> None:
    """Print the share of right sums over all iterations and over the last ones, by seed."""
    print(f"{machine()}\n")
    rows = []
    for method in METHODS:
        folders = sorted(done.parent for done in run_folder(root, method, 0).parent.glob("*/done"))
        curves = [[row["reward"] for _, row in sorted(read_metrics(folder).items())] for folder in folders]
        whole, last = (
            ", ".join(f"{fmean(curve[part]):.2f}" for curve in curves) for part in (slice(None), slice(-LAST, None))
        )
        rows.append((f"`{method}`", whole, last))
    print(table(f"method | all iterations | last {LAST}", rows))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=["train", "table"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.action == "table":
        print_table(args.folder)
        return
    prepare(args.folder)
    join_process_group()
    train(args.folder, args.seeds)
    leave_process_group()


if __name__ == "__main__":
    main()
