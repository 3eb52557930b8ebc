"""Checkpoints of the Tinker API: adapter folders, with the optimizer states for `weights`.

    OUTPUT/SESSION-train-0/weights/NAME           tinker://SESSION:train:0/weights/NAME
    OUTPUT/SESSION-train-0/sampler_weights/NAME   tinker://SESSION:train:0/sampler_weights/NAME

Each folder is an adapter that PEFT and other `rlhf` commands load.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlhf_cli.backends.training.adapter_trainer import AdapterShape, AdapterWeights
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import WEIGHTS_FILE
from rlhf_cli.models.folders import whole_folder

STATES, SAMPLER = "weights", "sampler_weights"
_KINDS = {STATES: "training", SAMPLER: "sampler"}
_PATH = re.compile(rf"tinker://([A-Za-z0-9]+:train:\d+)/({STATES}|{SAMPLER})/([A-Za-z0-9_-][A-Za-z0-9._-]*)")
_SNAPSHOT = "snapshot-"
_FACTS, _OPTIMIZER = "tinker.json", "optimizer.pt"


@dataclass(frozen=True)
class CheckpointPath:
    """Place of a checkpoint. Example: `CheckpointPath("ab12:train:0", "weights", "step-10")`."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Read a `tinker://` path. Raises UsageError if it is malformed."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise UsageError(f"path {path!r} is not of the form tinker://MODEL_ID/{STATES} or {SAMPLER}/NAME")
        return cls(*found.groups())

    @classmethod
    def snapshot(cls, model_id: str, number: int | None) -> "CheckpointPath":
        """Return the place of the weights of a sampling session without a name."""
        return cls(model_id, SAMPLER, f"{_SNAPSHOT}{number}")

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a checkpoint. Another checkpoint may be saved under the same name later; `created` differs then."""

    path: CheckpointPath
    created: float


@dataclass(frozen=True)
class Facts:
    """What `tinker.json` records of a checkpoint.

    - `fingerprint`: of the base model's weights. `created`: seconds since the epoch.
    - `user_metadata`: of the checkpoint. `run_metadata`: of the model in training.
    """

    shape: AdapterShape
    fingerprint: str
    created: float
    user_metadata: dict[str, object] | None = None
    run_metadata: dict[str, object] | None = None


class Checkpoints:
    """Checkpoints in the output folder. Names of other places are never part of a path."""

    def __init__(self, root: Path, *, fingerprint: str) -> None:
        """`fingerprint` identifies the base model's weights."""
        self._root, self._fingerprint = root, fingerprint

    def _folder(self, path: CheckpointPath) -> Path:
        return self._root / path.model_id.replace(":", "-") / path.kind / path.name

    def save(
        self,
        path: CheckpointPath,
        write_adapter: Callable[[Path], None],
        shape: AdapterShape,
        *,
        optimizer: Mapping[str, object] | None = None,
        facts: Mapping[str, dict[str, object] | None] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint atomically, with metadata in `facts`.

        Raises UsageError if it exists and may not be replaced.
        """
        folder = self._folder(path)
        if folder.exists() and not overwrite:
            raise UsageError(f"checkpoint {path} exists: set overwrite, or use another name")
        record = Facts(shape, self._fingerprint, time.time(), **(facts or {}))
        with whole_folder(folder) as written:
            write_adapter(written)
            (written / _FACTS).write_text(json.dumps(asdict(record)) + "\n")
            if optimizer is not None:
                torch.save(dict(optimizer), written / _OPTIMIZER)

    def facts(self, path: CheckpointPath) -> Facts:
        """Return what is known of a checkpoint. Raises UsageError if it is missing or of another base model."""
        file = self._folder(path) / _FACTS
        if not file.is_file():
            hint = " any more: --max_snapshots keeps the newest" if path.name.startswith(_SNAPSHOT) else ""
            raise UsageError(f"checkpoint {path} does not exist{hint}")
        plain = json.loads(file.read_text())
        facts = Facts(**{**plain, "shape": AdapterShape(**plain["shape"])})
        if facts.fingerprint != self._fingerprint:
            raise UsageError(f"checkpoint {path} was trained on another base model than this server's --pretrain")
        return facts

    def saved(self, path: CheckpointPath) -> SavedWeights:
        """Return the weights that are at a path now. Raises UsageError like `facts`."""
        return SavedWeights(path, self.facts(path).created)

    def weights(self, saved: SavedWeights) -> AdapterWeights:
        """Read weights. Raises UsageError if they have been removed or replaced."""
        facts = self.facts(saved.path)
        if facts.created != saved.created:
            raise UsageError(f"checkpoint {saved.path} has been replaced: create a new sampling client")
        return AdapterWeights(facts.shape.alpha, self.factors(saved.path))

    def factors(self, path: CheckpointPath) -> dict[str, torch.Tensor]:
        """Return the factors, named as in PEFT files."""
        return load_file(self._folder(path) / WEIGHTS_FILE)

    def optimizer(self, path: CheckpointPath) -> dict[str, object]:
        """Return the optimizer states. Raises UsageError if the checkpoint has none."""
        file = self._folder(path) / _OPTIMIZER
        if not file.is_file():
            raise UsageError(f"checkpoint {path} has no optimizer states: save it with save_state")
        states: dict[str, object] = torch.load(file, map_location="cpu", weights_only=True)
        return states

    def delete(self, path: CheckpointPath) -> None:
        """Remove a checkpoint. Raises UsageError if it does not exist."""
        self.facts(path)
        shutil.rmtree(self._folder(path))

    def trim(self, model_id: str, kept: int) -> None:
        """Remove all but the newest snapshots of a model."""
        found = self._folder(CheckpointPath(model_id, SAMPLER, "")).glob(f"{_SNAPSHOT}*")
        for folder in sorted(found, key=lambda one: int(one.name.removeprefix(_SNAPSHOT)))[: -kept or None]:
            shutil.rmtree(folder)

    def remove_snapshots(self) -> None:
        """Remove the snapshots of all models: their sampling sessions end with the server."""
        for folder in self._root.glob(f"*/{SAMPLER}/{_SNAPSHOT}*"):
            shutil.rmtree(folder)

    def listed(self, model_id: str) -> list[dict[str, object]]:
        """Describe the checkpoints of a model with names as the API does, oldest first."""
        # A malformed ID must not become a path.
        CheckpointPath.parse(str(CheckpointPath(model_id, STATES, "any")))
        found = []
        for kind, kind_name in _KINDS.items():
            for file in (self._root / model_id.replace(":", "-") / kind).glob(f"*/{_FACTS}"):
                path = CheckpointPath(model_id, kind, file.parent.name)
                if path.name.startswith(_SNAPSHOT):
                    continue
                facts = self.facts(path)
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{path.name}",
                        "checkpoint_type": kind_name,
                        "time": datetime.fromtimestamp(facts.created, UTC).isoformat(),
                        "tinker_path": str(path),
                        "size_bytes": sum(part.stat().st_size for part in file.parent.iterdir()),
                        "user_metadata": facts.user_metadata,
                    }
                )
        return sorted(found, key=lambda entry: str(entry["time"]))


def write_factors(factors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the factors of an adapter, named as in PEFT files, without its configuration."""
    save_file({name: factor.contiguous() for name, factor in factors.items()}, folder / WEIGHTS_FILE)
