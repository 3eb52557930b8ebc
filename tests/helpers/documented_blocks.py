"""Shell blocks of documentation pages that a test runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NAMED = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


def marked_blocks(page: Path, mark: str) -> list[str]:
    """Return the shell blocks of a page with the comment `<!-- MARK -->` in the line before them."""
    return re.findall(rf"<!-- {re.escape(mark)} -->\n+```bash\n(.*?)```", page.read_text(), re.DOTALL)


def write_named_files(page: Path, folder: Path) -> None:
    """Write the Python blocks of a page that start with a file name; the last one with a name wins."""
    for name, code in NAMED.findall(page.read_text()):
        (folder / name).write_text(code)


def add_program(folder: Path) -> None:
    """Write `bin/rlhf`, which runs this checkout."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "rlhf"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlhf_cli "$@"\n')
    program.chmod(0o755)


def shell(script: str, folder: Path, *, codes: tuple[int, ...] = (0,)) -> None:
    """Run a script in a folder with `bin/rlhf`; its exit status must be one of `codes`."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "MODEL": "models/start"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in codes, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
