"""Separate torchvision install for vLLM, which requires it for some vision-language models.

On a CPU, `make setup` installs torchvision into a folder outside the import path. In the main environment, transformers
would import it in every process, which doubles the startup time.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from rlhf_cli.models.vision.families.table import FAMILIES, TEXT_ONLY, TORCHVISION

_FOLDER = Path(sys.prefix) / "torchvision"
"""Folder into which `make setup` installs the package."""


def lacks_torchvision(model_type: str, *, folder: Path = _FOLDER) -> bool:
    """Return whether vLLM cannot load this model type because torchvision is missing."""
    return _needs_it(model_type) and not _is_there(folder)


def use_torchvision(model_path: str, *, folder: Path = _FOLDER) -> None:
    """Make torchvision importable in this process and its children, if the model requires it.

    Call it before importing transformers, which checks only once whether torchvision is installed.
    """
    model_type = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if not _needs_it(model_type) or not _is_there(folder):
        return
    # Appended, so that the folder never shadows a package of the environment.
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def _needs_it(model_type: str) -> bool:
    """Return whether vLLM requires torchvision for this model type, and the environment does not have it."""
    # vLLM imports the image processor of a type even if no prompt has images.
    is_needed = model_type in TEXT_ONLY or (model_type in FAMILIES and TORCHVISION in FAMILIES[model_type].vllm_needs)
    return is_needed and find_spec(TORCHVISION) is None


def _is_there(folder: Path) -> bool:
    return (folder / "torchvision" / "__init__.py").is_file()
