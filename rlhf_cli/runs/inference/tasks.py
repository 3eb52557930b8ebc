"""`rlhf eval --tasks`: runs tasks of lm-evaluation-harness or Inspect against vLLM's server with each model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus
from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.engine import engine_settings
from rlhf_cli.backends.rollout.vllm_arguments import check_vllm_args
from rlhf_cli.backends.rollout.vllm_server import ServedModel, served_model, stop_with_children
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.config.evaluation import TasksConfig
from rlhf_cli.data.selection import write_rows
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import to_yaml
from rlhf_cli.runs.inference.model import InferenceModel, find_inference_model
from rlhf_cli.runs.inference.output_folder import (
    FIGURES,
    WHOLE_MODEL,
    answers_folder,
    check_folder,
    installed_versions,
    prepare_folder,
)
from rlhf_cli.runs.inference.task_results import Row, TaskMetric, TaskResults, read_inspect, read_lm_eval
from rlhf_cli.runs.run_directory import LOGS
from rlhf_cli.tracking.sinks import SAMPLES_FILE
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.terminal.evaluation_table import print_table

_REQUESTS = 64
"""Requests in flight. vLLM batches them, so more would only wait."""
_LAST_LINES = 5


@dataclass(frozen=True)
class _Call:
    """How to start a package on a model: arguments after the interpreter, and environment variables."""

    words: list[str]
    variables: dict[str, str]


def _lm_eval(benchmark: TasksConfig, served: ServedModel, tokenizer: str, output: Path, max_len: int) -> _Call:
    # Completions instead of chat completions, because multiple choice reads the log-probs of the prompt.
    model = {
        "model": served.name,
        "base_url": f"{served.url}/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": _REQUESTS,
        "max_length": max_len,
    }
    words = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args"]
    words += [f"{name}={value}" for name, value in model.items()]
    words += ["--tasks", ",".join(benchmark.names), "--output_path", str(output), "--log_samples", *benchmark.words]
    return _Call(words, {"OPENAI_API_KEY": served.key})


def _inspect(benchmark: TasksConfig, served: ServedModel, tokenizer: str, output: Path, max_len: int) -> _Call:
    words = ["-m", "inspect_ai", "eval", *benchmark.names, "--model", f"openai-api/rlhf/{served.name}"]
    words += ["--log-dir", str(output), "--log-format", "json", "--display", "plain"]
    words += ["--max-connections", str(_REQUESTS), *benchmark.words]
    return _Call(words, {"RLHF_API_KEY": served.key, "RLHF_BASE_URL": served.url})


_Read = Callable[[Path, Callable[[str], int]], TaskResults]
_HARNESSES: dict[str, tuple[Callable[[TasksConfig, ServedModel, str, Path, int], _Call], _Read]] = {
    "lm_eval": (_lm_eval, read_lm_eval),
    "inspect": (_inspect, read_inspect),
}
"""By name in --tasks: how to start the package, and how to read its output."""


def run_tasks(config: EvalConfig) -> None:
    """Run the tasks on each model, then show and write the metrics.

    Raises:
        UsageError: a model, an engine argument or the output folder is unusable.
        RunError: the server or the package fails.
    """
    check_vllm_args(config.engine, backend=_vllm(config), on_cpu=not may_have_gpus())
    with answers_folder(config.out.output) as root, output_lock(root):
        check_folder(root, config.out)
        models = {
            name: find_inference_model(config.model.model_copy(update={"pretrain": name}))
            for name in config.model.names
        }
        for model in models.values():
            rollout_backend(config.engine, model.architecture)
        prepare_folder(root, to_yaml(config), _identity(config, models), keep=False)
        with quiet_process(root / LOGS / "driver.log") as terminal:
            console = terminal.console
            results = {
                name: _run_model(config, model, root, console, number=number)
                for number, (name, model) in enumerate(models.items())
            }
            _write(config, root, results)
            print_table(console, metrics_table({name: found.metrics for name, found in results.items()}))
            if config.out.output is not None:
                console.print(f"Figures: {root / FIGURES}", soft_wrap=True, highlight=False)


def _vllm(config: EvalConfig) -> str:
    if (backend := rollout_backend(config.engine)) != "vllm":
        raise UsageError(
            "--tasks asks vLLM's server: install rlhf-cli[vllm] (GPU) or rlhf-cli[cpu], and leave out "
            "--rollout_backend transformers"
        )
    return backend


def _identity(config: EvalConfig, models: dict[str, InferenceModel]) -> dict[str, object]:
    """Return what two outputs must have in common to be compared, and hashes of the weights."""
    weights = {f"fingerprint of the weights of {name}": model.fingerprint() for name, model in models.items()}
    return {
        "command": "eval",
        "tasks": config.benchmark.tasks,
        "tasks_args": config.benchmark.tasks_args,
        "max_len": config.prompts.max_len,
        "param_dtype": config.model.param_dtype,
        "seed": config.sampling.seed,
        "vllm_args": config.engine.vllm_args,
        **weights,
    }


def _run_model(config: EvalConfig, model: InferenceModel, root: Path, console: Console, *, number: int) -> TaskResults:
    """Serve one model, run the tasks, and read the results."""

    def tell(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    benchmark, max_len = config.benchmark, config.prompts.max_len
    settings = engine_settings(
        config.engine,
        config.model,
        config.pictures,
        max_model_len=max_len,
        seed=config.sampling.seed,
        gpu_memory_utilization=config.engine.vllm_gpu_memory_utilization or _GPU_SHARE,
    )
    start, read = _HARNESSES[benchmark.harness]
    output, log = root / benchmark.harness / str(number), root / LOGS / f"{benchmark.harness}_{number}.log"
    name = Path(model.source.pretrain).name
    with model.whole(root.resolve() / WHOLE_MODEL, tell=tell) as path:
        tell(f"Starting vLLM's server with {model.source.pretrain}")
        server_log = root / LOGS / f"server_{number}.log"
        with served_model(path, settings, name=name, on_cpu=not may_have_gpus(), log=server_log) as served:
            tell(f"Running {benchmark.tasks} (log: {log})")
            call = start(benchmark, served, path, output.resolve(), max_len)
            _run(call, log, package=benchmark.harness)

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]

    return read(output, count)


_GPU_SHARE = 0.9
"""Share of GPU memory: nothing else runs on the GPUs."""


def _run(call: _Call, log: Path, *, package: str) -> None:
    """Run the package until it ends. Raises RunError with the last lines of its log if it fails."""
    # Requests to this machine must not go through a proxy.
    variables = {**os.environ, "NO_PROXY": "127.0.0.1,localhost", **call.variables}
    with log.open("ab") as written:
        process = subprocess.Popen(
            [sys.executable, *call.words],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    try:
        status = process.wait()
    finally:
        stop_with_children(process)
    if status:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise RunError(f"{package} failed with exit status {status}; see {log}:\n" + "\n".join(lines[-_LAST_LINES:]))


def _write(config: EvalConfig, root: Path, results: dict[str, TaskResults]) -> None:
    """Write samples.jsonl and eval.json."""
    write_rows(root / SAMPLES_FILE, _numbered(results))
    metrics = [{"pretrain": name, **vars(metric)} for name, found in results.items() for metric in found.metrics]
    written = {"results": metrics, "settings": yaml.safe_load(to_yaml(config)), "versions": installed_versions()}
    (root / FIGURES).write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _numbered(results: dict[str, TaskResults]) -> Iterator[Row]:
    """Yield the rows with model, group and ID. Groups are numbered within each model."""
    for name, found in results.items():
        prompts = groupby(found.rows, key=lambda row: (row["source"], row["row"]))
        for group, ((source, place), samples) in enumerate(prompts):
            for row in samples:
                named = f"{source}:{place}/{group}.{row['sample']}@{row['weight_version']}"
                yield {"step": 1, "id": named, "pretrain": name, "group": group, **row}


def metrics_table(results: dict[str, list[TaskMetric]]) -> Table:
    """Build one row per model, task and metric, with the standard error that the package reports."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("model", "left"), ("task", "left"), ("metric", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for heading in ("prompts", "value", "std. error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, metrics in results.items():
        for metric in metrics:
            error = "" if metric.stderr is None else f"{metric.stderr:.4f}"
            cells = f"{metric.num_prompts:,}", f"{metric.value:.4f}", error
            table.add_row(name, metric.task, metric.name, *cells)
    return table
