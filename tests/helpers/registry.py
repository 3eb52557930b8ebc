"""Packages from the registry for tests that need them without installing them, cached between runs."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhf_cli.environment import user_cache
from rlhf_cli.models.folders import one_at_a_time, whole_folder

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WITHOUT_CUDA = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
"""Variables that let setup.py of source packages run without nvcc."""


def pinned(*names: str) -> list[str]:
    """Return the requirements of these packages in the optional dependencies of pyproject.toml."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found = {Requirement(text).name: text for texts in extras.values() for text in texts}
    return [found[name] for name in names]


def unpacked(*requirements: str, complete: bool = False) -> Path:
    """Return a folder with the packages; if `complete`, also with those that they need and this environment lacks.

    Without a registry the test is skipped.
    """
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    folder = user_cache("tests") / f"packages-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder):
        if not folder.is_dir():
            with whole_folder(folder) as written:
                missing = list(requirements)
                while missing:
                    for requirement in missing:
                        _download(requirement, written)
                    missing = _missing(written) if complete else []
    return folder


def _download(requirement: str, folder: Path) -> None:
    archives = folder / "archives"
    command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation")]
    done = subprocess.run(
        [*command, "--dest", str(archives), requirement],
        env=os.environ | WITHOUT_CUDA,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {done.stderr[-300:]}")
    (archive,) = archives.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            # Compiled parts are large and need the GPU.
            wheel.extractall(folder, [name for name in wheel.namelist() if not name.endswith(".so")])
    else:
        _extract_source(archive, folder)
    archive.unlink()


def _extract_source(archive: Path, folder: Path) -> None:
    """Extract the Python package of a source archive, which has the name of the project."""
    project = archive.name.rsplit("-", 1)[0]
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name.startswith(f"{project}/"):
                source.extract(member, folder, filter="data")


def _missing(folder: Path) -> list[str]:
    added = [*distributions(path=[str(folder)])]
    known = {_normal(found.name) for found in (*distributions(), *added)}
    needed = [Requirement(text) for found in added for text in found.requires or ()]
    return [str(one) for one in needed if not one.marker and _normal(one.name) not in known]


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
