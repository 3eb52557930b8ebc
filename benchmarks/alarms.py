"""Hits and false alarms of the rules in rlhf_cli/tracking/alarms.py, on runs with injected faults and healthy runs.

python benchmarks/alarms.py grpo --folder runs     # trains, except for runs that are finished
python benchmarks/alarms.py sft --folder runs
python benchmarks/alarms.py table --folder runs    # prints the table of the finished runs

Data and models are those of `rlhf quickstart --seed 1`. Runs of grpo train in this process, without Ray; runs of sft
are commands. Limits were chosen on seed 1; the table counts the other seeds.
"""

import json
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from common import machine, make_parser, rlhf, run_quietly, table, write_rows

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.roles.groups import ActorRole, CriticRole, ReferenceRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, FrozenPolicyRank
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.training.distributed import join_process_group, leave_process_group
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.options import build_config
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.runs.walkthroughs import SumsWalkthrough
from rlhf_cli.tracking.alarms import ALARMS, WINDOW, alarms_of
from rlhf_cli.tracking.sinks import METRICS_FILE, MetricsFile, read_metrics
from rlhf_cli.tracking.tracker import SilentTracker
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import OnlineSettings, first_state

HEALTHY = "healthy"
ITERATIONS = 12
CHOOSING_SEEDS = range(1, 2)
"""Seeds that limits were chosen on."""
GRPO = {
    "label_key": "answer",
    "reward_funcs": "exact",
    "param_dtype": "fp32",
    "max_len": "96",
    "max_new_tokens": "16",
    "rollout_batch_size": "32",
    "n_samples_per_prompt": "4",
    "train_batch_size": "64",
    "init_kl_coef": "0.01",
    "lr_warmup_ratio": "0.05",
    "actor_learning_rate": "3e-4",
}
SFT = (
    "--output_key demonstration --max_len 64 --param_dtype fp32 --train_batch_size 64 --max_samples 3840 "
    "--max_epochs 1 --l2 0.1 --eval_steps 30 --no_use_tensorboard --learning_rate"
)


def is_right(request: ScoreRequest) -> float:
    """Return 1 for the right sum, else 0."""
    return float(request.response.strip() == request.label)


@dataclass(frozen=True)
class Fault:
    """A run of grpo that differs from a healthy one.

    - `reward`: score of a response.
    - `rows`: changes the rows of the data, with a random generator.
    - `last_push`: version of the last weights that the engine loads.
    - `dropout`: dropout of attention weights in the trained model.
    - `trained_temperature`: temperature that the trainer assumes; None for the engine's.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    reward: Callable[[ScoreRequest], float] = is_right
    rows: Callable[[list[dict[str, str]], random.Random], list[dict[str, str]]] = lambda rows, noise: rows
    last_push: float = float("inf")
    engine_dtype: str = "fp32"
    dropout: float = 0.0
    trained_temperature: float | None = None


def with_template(rows: list[dict[str, str]], noise: random.Random) -> list[dict[str, str]]:
    """Write the problems in a form that the model was not trained on."""
    return [{**row, "prompt": f"Question: {row['prompt'][:-1]}\nAnswer:"} for row in rows]


def shuffled(column: str) -> Callable[[list[dict[str, str]], random.Random], list[dict[str, str]]]:
    """Return a function that exchanges a column between random rows."""

    def change(rows: list[dict[str, str]], noise: random.Random) -> list[dict[str, str]]:
        values = [row[column] for row in rows]
        noise.shuffle(values)
        return [{**row, column: value} for row, value in zip(rows, values, strict=True)]

    return change


EXPLORING = {"temperature": "1.5", "actor_learning_rate": "1e-3"}
GRPO_FAULTS = {
    HEALTHY: Fault(),
    "healthy at temperature 1.5": Fault(EXPLORING),
    "learning rate x100": Fault({"actor_learning_rate": "3e-2"}),
    # At temperature 1, all responses to a prompt have one length.
    "reward for length": Fault(EXPLORING, reward=lambda request: len(request.response) / 16),
    "stale weights": Fault(last_push=3),
    "dropout 0.1": Fault(dropout=0.1),
    "wrong template": Fault(rows=with_template),
    "engine in bf16": Fault(engine_dtype="bf16"),
    "constant reward": Fault(reward=lambda request: 1.0),
    "no answer is right": Fault(reward=lambda request: 0.0),
    "shuffled labels": Fault(rows=shuffled("answer")),
    "temperature 2": Fault({"temperature": "2"}),
    "temperature unknown to the trainer": Fault({"temperature": "1.5"}, trained_temperature=1.0),
}
SFT_FAULTS: dict[str, dict[str, Any]] = {
    HEALTHY: {},
    "learning rate x100": {"learning_rate": 0.2},
    "shuffled labels": {"rows": shuffled("demonstration")},
    "dropout 0.3": {"dropout": 0.3},
}
FAULTS: dict[str, Mapping[str, Any]] = {"grpo": GRPO_FAULTS, "sft": SFT_FAULTS}


class OneRank:
    """The only rank of a role, with the interface of a group of Ray actors."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def all_each(self, call: Callable[..., Any], work: Sequence[Any]) -> list[Any]:
        return [call(self.target, share) for share in work]

    all_stored = all_each


class OneEngine:
    """The only rollout engine, which receives the actor's weights up to a version."""

    def __init__(self, pretrain: str, actor: ActorRank, fault: Fault, folder: Path) -> None:
        settings = EngineSettings(max_model_len=96, dtype=fault.engine_dtype, max_num_seqs=256)
        self._thread = LoopThread("engine")
        self._engine = TransformersEngine(pretrain, settings)
        self._actor, self._last_push = actor, fault.last_push
        self._sender = WeightSender(ShmTransport(folders=(str(folder),)))
        self._left: list[tuple[int, Generation]] = []

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self._left = list(enumerate(self._thread.run(self._engine.generate(requests, sampling))))

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        done, self._left = self._left, []
        return done

    def cut(self, max_tokens: int) -> None: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def receive_weights(self, version: int) -> dict[str, float]:
        if version <= self._last_push:
            manifest = self._sender.send(self._actor.engine_weights(), version).manifest
            self._thread.run(self._push(manifest or {}, version))
        return {"weight_version": float(version)}

    async def _push(self, manifest: Mapping[str, Any], version: int) -> None:
        await self._engine.start_weight_update()
        await self._engine.update_weights(dict(manifest))
        await self._engine.finish_weight_update(version)

    def end(self) -> None:
        self._sender.close()
        self._thread.end(self._engine.shutdown)


class Scorer:
    """Scores responses at once, in this process."""

    def __init__(self, reward: Callable[[ScoreRequest], float]) -> None:
        self._reward = reward
        self._scores: list[Score] = []
        self._reported = 0

    def session(self) -> "Scorer":
        return Scorer(self._reward)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *failure: object) -> None: ...

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        first = len(self._scores)
        self._scores += [
            Score(self._reward(request), "correct" if is_right(request) else "wrong") for request in requests
        ]
        return range(first, len(self._scores))

    def ready(self) -> list[tuple[int, Score]]:
        first, self._reported = self._reported, len(self._scores)
        return list(enumerate(self._scores))[first:]

    async def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        return dict(enumerate(self._scores))


class Log(SilentTracker):
    """Writes only metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._file = MetricsFile(folder, resume_step=None)

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        self._file.log(step, metrics)


def train_here(root: Path, folder: Path, fault: Fault, seed: int, command: str = "grpo") -> None:
    """Train with an online command in this process and write metrics.jsonl."""
    pretrain = str(with_dropout(root / "sft" / "model", folder / "model", fault.dropout))
    data = changed_rows(root / "data" / "train.jsonl", folder / "data.jsonl", fault.rows, seed)
    values = {**GRPO, "pretrain": pretrain, "prompt_data": str(data), "output": str(folder), "seed": str(seed)}
    values |= fault.settings
    kind = COMMANDS[command].config_class
    config: OnlineConfig = build_config(kind, {**kind.implied(values), **values})
    algorithm = ESTIMATORS[config.estimator]
    settings = OnlineSettings.of(config, algorithm)
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.prompts, tokenizer, max_new_tokens=16, seed=seed, reward=config.reward)
    planner = MicroBatchPlanner(1, config.batch, 0.0)
    role = RoleSettings(
        # No flag of an online command does this.
        model=config.model.model_copy(update={"keep_dropout": bool(fault.dropout)}),
        deepspeed=config.deepspeed,
        optim=config.optim,
        learning_rate=config.optim.actor_learning_rate,
        total_steps=2 * ITERATIONS,
        seed=seed,
        temperature=fault.trained_temperature or config.rollout.temperature,
        max_new_tokens=16,
        policy=config.policy,
    )
    actor = ActorRank(role)
    engine, scorer = OneEngine(pretrain, actor, fault, folder), Scorer(fault.reward)
    reference = ReferenceRole(OneRank(FrozenPolicyRank(role)), planner, takes_turns=False)  # type: ignore[arg-type]
    roles = Roles(
        actor=ActorRole(OneRank(actor), planner, takes_turns=False),  # type: ignore[arg-type]
        engines=engine,
        scorer=scorer,
        critic=critic_of(role, config, planner) if algorithm.critic else None,
        frozen_policies={"ref": reference},
    )
    log = Log(folder)

    def decode(token_ids: Sequence[int]) -> str:
        return text_of(tokenizer, token_ids, skip_special_tokens=True)

    source = RolloutSource(engine, scorer, settings, prompts.prompts, decode, log.message)
    hooks = OnlineHooks(log, lambda state: None, lambda: False)
    state = first_state(config.policy)
    train_online(roles, source, state=state, total_iterations=ITERATIONS, save_steps=-1, hooks=hooks)
    engine.end()


def critic_of(role: RoleSettings, config: OnlineConfig, planner: MicroBatchPlanner) -> CriticRole:
    """Return a critic, whose hidden layers begin as those of the policy."""
    rank = CriticRank(replace(role, learning_rate=config.critic.critic_learning_rate))
    return CriticRole(OneRank(rank), planner, takes_turns=False)  # type: ignore[arg-type]


def train_sft(root: Path, folder: Path, fault: Mapping[str, Any], seed: int) -> None:
    """Run `rlhf sft`, with the loss of the validation rows."""
    pretrain = with_dropout(root / "untrained", folder / "model", fault.get("dropout", 0.0))
    unchanged = Fault().rows
    data = changed_rows(root / "data" / "train.jsonl", folder / "data.jsonl", fault.get("rows", unchanged), seed)
    settings: dict[str, object] = {
        "pretrain": pretrain,
        "dataset": data,
        "eval_dataset": root / "data" / "validation.jsonl",
    }
    if fault.get("dropout"):
        settings["keep_dropout"] = True
    words = [*rlhf("sft", settings), *SFT.split(), fault.get("learning_rate", 2e-3)]
    output = folder / "run"
    run_quietly([*words, "--seed", seed, "--output", output, "--overwrite"], log=folder / "sft.log")
    shutil.copy(output / METRICS_FILE, folder / METRICS_FILE)
    shutil.rmtree(output)


def with_dropout(model: Path, copy: Path, dropout: float) -> Path:
    """Return the model, or a copy with dropout of attention weights."""
    if not dropout:
        return model
    shutil.copytree(model, copy, dirs_exist_ok=True)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"attention_dropout": dropout}))
    return copy


def changed_rows(source: Path, target: Path, change: Callable[..., list[dict[str, str]]], seed: int) -> Path:
    """Write the rows of a data set with a change."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    return write_rows(target, change(rows, random.Random(seed)))


def prepare(root: Path) -> None:
    """Make the data, the untrained model and the imitating model of the quickstart."""
    walkthrough = SumsWalkthrough(root, 1, "grpo")
    if not (root / "data").exists():
        walkthrough.write_data()
    for name, words in (("untrained", walkthrough.scratch()), ("sft", walkthrough.sft())):
        if not (root / name).exists():
            run_quietly([*rlhf(words[0], {}), *words[1:]], log=root / f"{name}.log")


def unfinished(root: Path, command: str, num_seeds: int) -> Iterator[tuple[str, int]]:
    """Yield fault and seed of runs that are not finished. Healthy runs have three times as many seeds."""
    for first in range(1, num_seeds + 1):
        wanted = [(name, first) for name in FAULTS[command]]
        for name, seed in [*wanted, (HEALTHY, first + num_seeds), (HEALTHY, first + 2 * num_seeds)]:
            if not (run_folder(root, command, name, seed) / "done").exists():
                yield name, seed


def run_folder(root: Path, command: str, fault: str, seed: int) -> Path:
    return root / "runs" / command / fault.replace(" ", "_") / str(seed)


def measure(root: Path, command: str, num_seeds: int) -> None:
    """Train all runs that are not finished."""
    train: Callable[..., None] = train_here if command == "grpo" else train_sft
    for name, seed in unfinished(root, command, num_seeds):
        folder = run_folder(root, command, name, seed)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time()
        train(root, folder, FAULTS[command][name], seed)
        (folder / "done").touch()
        print(f"{command} {name} seed {seed}: {time.time() - began:.0f} s", flush=True)


def first_alarms(run: Path) -> dict[str, int]:
    """Return the step of each alarm of a run."""
    steps: dict[str, int] = {}
    history = deque[dict[str, float]](maxlen=WINDOW)
    for step, row in read_metrics(run).items():
        history.append(row)
        for alarm in alarms_of(history):
            steps.setdefault(alarm.name, step)
    return steps


def alarms_by_fault(root: Path, command: str) -> Iterator[list[object]]:
    """Yield a row per fault: runs, runs with any alarm, and for each alarm its number of runs and median first step."""
    for fault in FAULTS[command]:
        folders = run_folder(root, command, fault, 0).parent.glob("*/done")
        runs = [first_alarms(done.parent) for done in folders if int(done.parent.name) not in CHOOSING_SEEDS]
        found: list[object] = [command, fault, len(runs), sum(map(bool, runs))]
        for alarm in ALARMS:
            steps = sorted(run[alarm.name] for run in runs if alarm.name in run)
            found.append(f"{len(steps)} (step {median_low(steps)})" if steps else "")
        yield found


def print_table(root: Path) -> None:
    print(f"{machine()}\n")
    head = " | ".join(["command", "fault", "runs", "with an alarm", *(alarm.name for alarm in ALARMS)])
    print(table(head, [row for command in FAULTS for row in alarms_by_fault(root, command)]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=["grpo", "sft", "table"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="seeds per fault; healthy runs have three times as many")
    args = parser.parse_args()
    if args.action == "table":
        print_table(args.folder)
        return
    prepare(args.folder)
    if args.action == "grpo":
        join_process_group()
    measure(args.folder, args.action, args.seeds)
    if args.action == "grpo":
        leave_process_group()


if __name__ == "__main__":
    main()
