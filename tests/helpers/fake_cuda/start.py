"""Starts programs with a pretended CUDA device."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent


def run_fake(program: str, *arguments: str, packages: Path | None = None, **variables: str) -> dict[str, dict]:
    """Run a program of this folder on fake CUDA tensors, with packages from a folder and environment variables.

    Returns its results: JSON lines, each with a name.
    """
    environment = os.environ | {
        "LD_PRELOAD": str(_library()),
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, [HERE.parents[2], HERE, HERE.parent, packages]))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result.pop("name"): result for result in results}


def _library() -> Path:
    """Compile the guard, once per PyTorch release and source."""
    source = HERE / "guard.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"fake_cuda_guard_{os.getuid()}_{digest}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        includes = [f"-I{path}" for path in include_paths()]
        libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *includes, str(source), *libraries]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-o", str(unfinished)], check=True)
        unfinished.rename(built)
    return built
