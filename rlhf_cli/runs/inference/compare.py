"""Implementation of `rlhf compare`: evaluates models that have no evaluation, and compares pairs."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rlhf_cli.commands.compare import CompareConfig
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.early_checks import check_early
from rlhf_cli.runs.inference.bisection import OF_THE_OUTPUT, bisected, recorded_run
from rlhf_cli.runs.inference.comparison_text import bisection_lines, comparison_json, comparison_lines
from rlhf_cli.runs.inference.evaluate import run_evaluation
from rlhf_cli.runs.inference.model import find_inference_model
from rlhf_cli.runs.inference.outputs import EvalOutput, output_folder, read_outputs
from rlhf_cli.runs.inference.paired import compared


def run_compare(config: CompareConfig) -> None:
    """Compare two models, or find the checkpoint at which a metric broke."""
    settings = config.compare
    if settings.bisect:
        _bisect(config)
        return
    a, b = _outputs(config)
    comparison = compared(a, b, metric=settings.metric, common=settings.common, may_differ=settings.may_differ)
    if settings.as_json:
        print(json.dumps(comparison_json(comparison, settings), indent=1))
    else:
        print("\n".join(comparison_lines(comparison, settings)))


def _outputs(config: CompareConfig) -> list[EvalOutput]:
    """Return the two outputs. Models without one are evaluated.

    Raises:
        UsageError: there are more or fewer than two models, or settings are missing.
    """
    names = config.compare.models
    known = {name: read_outputs(name) for name in names if output_folder(name) is not None}
    if (number := sum(len(known.get(name, [name])) for name in names)) != 2:
        raise UsageError(
            f"{' '.join(names)}: number of models {number}, but two are compared; name one model of an "
            "output as OUTPUT:MODEL"
        )
    adopted = next((outputs[0].settings for outputs in known.values()), {})
    values = settings_of_evaluation(config, adopted)
    return [output for name in names for output in known.get(name) or [evaluated(config, name, values)]]


def settings_of_evaluation(config: CompareConfig, adopted: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of evaluations to run: adopted ones, overridden by given flags."""
    values = {name: value for name, value in adopted.items() if name not in OF_THE_OUTPUT}
    for group, settings in config:
        if group == "compare":
            continue
        given = settings.model_fields_set & set(config.supported(group))
        values |= {name: getattr(settings, name) for name in given}
    return values


def evaluated(config: CompareConfig, model: str, values: Mapping[str, object]) -> EvalOutput:
    """Evaluate a model, unless it was evaluated with the same settings before.

    Raises:
        UsageError: settings are missing, or the model or data do not exist.
    """
    if not values.get("prompt_data"):
        raise UsageError(f"{model} has no evaluation: set --prompt_data and a reward, as in rlhf eval")
    named = build_config(EvalConfig, {**values, "pretrain": model})
    check_early(named)
    folder = Path(config.compare.output) / _folder_name(named)
    keeps = not config.compare.overwrite
    placed = {"output": str(folder), "load_checkpoint": keeps, "overwrite": not keeps}
    with _stdout_to_stderr() if config.compare.as_json else nullcontext():
        # Earlier responses are checked against model, prompts and settings, and only missing ones are sampled.
        run_evaluation(build_config(EvalConfig, {**values, "pretrain": model, **placed}))
    return read_outputs(str(folder))[0]


def _folder_name(config: EvalConfig) -> str:
    """Return a folder name that depends on the settings and on the model's weights."""
    weights = find_inference_model(config.model.model_copy()).fingerprint()
    digest = hashlib.sha256(f"{weights} {to_yaml(config)}".encode()).hexdigest()[:8]
    parts = re.sub(r"[^\w.-]+", "-", config.model.pretrain).strip("-.")
    return f"{parts[-60:]}-{digest}"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect descriptor 1 to descriptor 2, so that only JSON is written to stdout."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _bisect(config: CompareConfig) -> None:
    settings = config.compare
    run = recorded_run(Path(settings.models[0]).expanduser())
    adopted = run.evaluation_settings()
    values = settings_of_evaluation(config, adopted)
    # Logged metrics used the run's own prompts, rewards and sampling.
    if values != adopted:
        run = run.without_logged()
    found = bisected(run, lambda point: evaluated(config, str(point.path), values), metric=settings.metric)
    if settings.as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        print("\n".join(bisection_lines(found, settings.detect)))
