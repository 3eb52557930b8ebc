"""What the program calls of vLLM, checked against the sources in a folder, without importing vLLM.

mypy reads the program's own calls and overrides with the types of that vLLM. Calls that the program makes with a dict
or across processes are written out in a module of their own.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import rlhf_cli
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments

PROGRAM = Path(rlhf_cli.__file__).parent
SKIPPED = ("torch", "transformers", "deepspeed", "ray", "datasets", "peft", "numpy", "pandas")
WEIGHT_TRANSFER = "vllm.distributed.weight_transfer"
OTHER = {int: 2, str: "text", bool: True, float: 0.5, type(None): 1}
"""Another value by the type of a setting's usual value."""
OTHER_OF = {"enforce_eager": True, "dtype": "fp32", "sync_backend": "nccl"}


def program_files() -> list[Path]:
    """Return the modules of the program that import vLLM."""
    files = [file for file in sorted(PROGRAM.rglob("*.py")) if "vllm" in file.read_text()]
    return [file for file in files if any(imported_modules(file))]


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def environment_names() -> set[str]:
    """Return the environment variables of vLLM that the program sets or reads."""
    return {name for file in PROGRAM.rglob("*.py") for name in re.findall('"(VLLM_[A-Z0-9_]+)"', file.read_text())}


def engine_argument_sets() -> list[dict[str, Any]]:
    """Return engine arguments for all settings of engines: each with another value once, on CPU and GPU."""
    plain = EngineSettings(max_model_len=64, max_images_per_prompt=1, max_pixels=9)
    changed = [plain, replace(plain, tensor_parallel_size=2, max_images_per_prompt=None)]
    for one in fields(EngineSettings):
        if (kind := type(getattr(plain, one.name))) in OTHER:
            other: dict[str, Any] = {one.name: OTHER_OF.get(one.name, OTHER[kind])}
            changed.append(replace(plain, **other))
    made = [engine_arguments("model", one, on_cpu=on_cpu) for one in changed for on_cpu in (False, True)]
    return [found for index, found in enumerate(made) if found not in made[:index]]


class Sources:
    """vLLM's sources in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, module: str) -> Path | None:
        base = self.folder / module.replace(".", "/")
        return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)

    def tree(self, module: str) -> ast.Module:
        file = self.path(module)
        assert file is not None, f"vLLM has no module {module}"
        return ast.parse(file.read_text())

    def definition(self, module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
        """Return a class, function, or "Class.method"."""
        found: Any = self.tree(module)
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found = next(node for node in found.body if isinstance(node, kinds) and node.name == part)
        return found

    def run(self, module: str, name: str, **names: Any) -> Any:
        """Execute one definition with these names instead of those of its module. Returns it."""
        node = self.definition(module, name)
        code = ast.Module([ast.parse("from __future__ import annotations").body[0], node], [])
        exec(compile(code, module, "exec"), names)
        return names[node.name]

    @cached_property
    def text(self) -> str:
        """All source code, in which texts of more than one line are joined."""
        files = (self.folder / "vllm").rglob("*.py")
        return "\n".join(re.sub(r'"\n\s+f?"', "", file.read_text()) for file in files)

    def modules_near(self, files: list[Path]) -> set[str]:
        """Return the modules that these files import, and those that they import."""
        direct = {name for file in files for name in imported_modules(file) if self.path(name)}
        paths = [path for name in direct if (path := self.path(name))]
        return direct | {name for path in paths for name in imported_modules(path) if self.path(name)}


def written_out() -> str:
    """Return a module with the calls that the program makes with a dict, and its classes in the roles of vLLM's."""
    lines = []
    for found in engine_argument_sets():
        # vLLM makes a WeightTransferConfig from the dict.
        given = [f"{name}={value!r}" for name, value in found.items() if name != "weight_transfer_config"]
        lines.append(f"AsyncEngineArgs({', '.join(given)})")
    calls = "\n".join(lines)
    return f"""
from collections.abc import Iterator
import torch
from vllm import AsyncEngineArgs
from vllm.config.weight_transfer import WeightTransferConfig
from {WEIGHT_TRANSFER}.base import ParamMeta, VLLMWeightSyncClient, WeightSource
from {WEIGHT_TRANSFER}.nccl_common import NCCLWeightTransferInitInfo
from rlhf_cli.backends.weight_sync.vllm_trainer import EngineClient, PushSource

class Source(WeightSource):
    own = PushSource([])

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(one.name, one.dtype, one.shape) for one in self.own.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.own)

Source()
client: VLLMWeightSyncClient = EngineClient(lambda call, values: None, num_engines=1)
WeightTransferConfig(backend="rlhf_nccl")
def offset(info: NCCLWeightTransferInitInfo) -> int: return info.rank_offset
{calls}
"""


def type_errors(sources: Sources, folder: Path, cache: Path) -> str:
    """Return mypy's errors in the program's use of these sources; files are written to `folder`."""
    extra, settings = folder / "written_out.py", folder / "mypy.ini"
    extra.write_text(written_out())
    (folder / "vllm").symlink_to(sources.folder / "vllm")  # mypy refuses a path to installed packages
    files = [*program_files(), extra]
    skipped = ",".join(f"{name}.*" for name in (*SKIPPED, "vllm"))
    near = "".join(f"[mypy-{name}]\nfollow_imports = silent\n" for name in sorted(sources.modules_near(files)))
    options = "ignore_missing_imports = true\ncheck_untyped_defs = true\nfollow_imports = silent\n"
    settings.write_text(f"[mypy]\n{options}[mypy-{skipped}]\nfollow_imports = skip\n{near}")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(cache)]
    done = subprocess.run(
        [*command, "--explicit-package-bases", "--no-error-summary", *map(str, files)],
        env=os.environ | {"MYPYPATH": f"{folder}:{PROGRAM.parent}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
