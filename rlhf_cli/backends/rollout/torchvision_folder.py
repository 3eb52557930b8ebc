"""torchvision for vLLM's models of some vision-language families, where the environment has none of its own.

On a CPU `make setup` puts it into a folder that nothing else looks into: transformers imports torchvision wherever it
finds it, which doubles the time in which every process starts.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchvision"
"""Where `make setup` puts the package."""
NEEDS_TORCHVISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm")
"""Types whose models in vLLM, or whose processors, import torchvision."""


def lacks_torchvision(model_type: str, *, folder: Path = FOLDER) -> bool:
    """Return whether vLLM cannot load models of this type, for want of torchvision."""
    return model_type in NEEDS_TORCHVISION and find_spec("torchvision") is None and not _is_there(folder)


def use_torchvision(model_path: str, *, folder: Path = FOLDER) -> None:
    """Let this process and its children import torchvision from the folder, if the model in `model_path` needs it.

    To be called before transformers is imported, which looks once whether there is a torchvision.
    """
    model_type = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if model_type not in NEEDS_TORCHVISION or find_spec("torchvision") is not None or not _is_there(folder):
        return
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def _is_there(folder: Path) -> bool:
    return (folder / "torchvision" / "__init__.py").is_file()
