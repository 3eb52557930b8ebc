"""Separate torchvision install for vLLM, which requires it for some vision-language models.

On a CPU, `make setup` installs torchvision into a folder outside the import path. In the main environment, transformers
would import it in every process, which doubles the startup time.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchvision"
"""Folder into which `make setup` installs the package."""
NEEDS_TORCHVISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm")
"""Model types that require torchvision in vLLM, for the model or the processor."""


def lacks_torchvision(model_type: str, *, folder: Path = FOLDER) -> bool:
    """Return whether vLLM cannot load this model type because torchvision is missing."""
    return model_type in NEEDS_TORCHVISION and find_spec("torchvision") is None and not _is_there(folder)


def use_torchvision(model_path: str, *, folder: Path = FOLDER) -> None:
    """Make torchvision importable in this process and its children, if the model requires it.

    Call it before importing transformers, which checks only once whether torchvision is installed.
    """
    model_type = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if model_type not in NEEDS_TORCHVISION or find_spec("torchvision") is not None or not _is_there(folder):
        return
    # Appended, so that the folder never shadows a package of the environment.
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def _is_there(folder: Path) -> bool:
    return (folder / "torchvision" / "__init__.py").is_file()
