"""torchvision in a separate folder: which models need it, and which processes can import it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.backends.rollout.torchvision_folder import lacks_torchvision, use_torchvision

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="this environment has a torchvision"
)


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    """Hide torchvision from this process: an engine that an earlier test started here may have made it importable."""
    hidden = str(Path(sys.prefix) / "torchvision")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != hidden])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "packages" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


def test_models_of_some_types_lack_it_unless_it_is_in_the_folder(tmp_path, folder):
    assert lacks_torchvision("qwen2_5_vl", folder=tmp_path / "none")
    assert not lacks_torchvision("qwen2_5_vl", folder=folder)
    assert not lacks_torchvision("idefics3", folder=tmp_path / "none")
    assert not lacks_torchvision("qwen2", folder=tmp_path / "none")


@pytest.mark.parametrize(("model_type", "sees"), [("qwen2_5_vl", True), ("idefics3", False), ("qwen2", False)])
def test_an_engine_and_its_children_see_it_if_their_model_needs_it(tmp_path, folder, monkeypatch, model_type, sees):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    use_torchvision(str(tmp_path), folder=folder)
    assert (str(folder) in sys.path) is sees
    assert os.environ["PYTHONPATH"] == (f"before{os.pathsep}{folder}" if sees else "before")


def test_the_host_of_an_engine_does_not_import_transformers():
    code = "import sys, rlhf_cli.backends.rollout.engine_host; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
