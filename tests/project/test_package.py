"""The wheel and the sdist contain all files, and the installed wheel answers `rlhf --help`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "rlhf_cli")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def copy_of_the_source(folder: Path) -> Path:
    """Copy the files that a build needs, without leftovers of earlier builds."""
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        if (REPOSITORY / part).is_dir():
            shutil.copytree(REPOSITORY / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(REPOSITORY / part, source)
    return source


def run(*words: str, folder: Path) -> str:
    """Run a program without access to the repository or user settings and return its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def built(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    run(sys.executable, "-c", BUILD.format(kind), str(folder), folder=source)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copy_of_the_source(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def files_of_the_package() -> set[str]:
    """Return all files below rlhf_cli, including non-Python files."""
    found = (path for path in (REPOSITORY / "rlhf_cli").rglob("*") if path.is_file())
    return {str(path.relative_to(REPOSITORY)) for path in found if "__pycache__" not in path.parts}


def packed(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("rlhf_cli/")}


def test_the_wheel_has_every_file_of_the_package(wheel):
    assert packed(wheel) == files_of_the_package()
    # The attention kernel, which is compiled on first use, and the style and script of reports.
    assert {".cpp", ".css", ".js"} <= {Path(name).suffix for name in packed(wheel)}


def test_a_wheel_made_from_the_sdist_has_the_same_files(source, wheel, tmp_path):
    with tarfile.open(built("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"README.md", "LICENSE", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}
    assert packed(built("wheel", unpacked, tmp_path / "again")) == packed(wheel)


def test_the_wheel_in_an_empty_environment_answers_help(wheel, tmp_path):
    """The libraries of this environment are added by path, which exposes no other copy of the package."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = str(home / "bin" / "python")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
        folder=tmp_path,
    )
    place = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    (place / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert Path(run(python, "-c", "import rlhf_cli; print(rlhf_cli.__file__)", folder=tmp_path).strip()).is_relative_to(
        home
    )
    assert "quickstart" in run(str(home / "bin" / "rlhf"), "--help", folder=tmp_path)
    assert "--eps_clip" in run(str(home / "bin" / "rlhf"), "ppo", "--help", "all", folder=tmp_path)
