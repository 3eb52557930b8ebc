"""What `rlhf merge` does: finds the parts of a model, writes it whole and reads it again. Nothing is uploaded."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.backends.checkpoint import MANIFEST, verify
from rlhf_cli.backends.deepspeed_weights import DEEPSPEED, DESCRIPTION, EngineWeights
from rlhf_cli.commands.merge import MergeGroup
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapters import (
    MODEL_FILE,
    WEIGHTS_FILE,
    base_of,
    file_name,
    read_config,
    require_same_base,
)
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.models.loading import ADAPTER_FILE, DTYPES, TOKENIZER_FILES, adapter_folder, resolve_model_path
from rlhf_cli.models.merging import FoldedAdapter, verify_shards, write_shards
from rlhf_cli.models.weight_files import (
    RenamedTensors,
    SafetensorsFiles,
    TensorSource,
    fingerprint,
    folder_of,
    open_weights,
)

GENERATION = "generation_config.json"
TOKENS = tuple(range(1, 9))


@dataclass(frozen=True)
class Parts:
    """Where everything of a model is."""

    engine: Path | None  # a saved engine, or None where the adapter is a folder of its own
    description: Path  # folder with configuration and tokenizer, and with those of an adapter
    base: Path | None  # the model under the adapter, or None where there is no adapter

    def file(self, names: tuple[str, ...]) -> Path | None:
        """Folder that has one of these files: the model's own, or its base."""
        folders = [self.description, *([self.base] if self.base else [])]
        return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def run_merge(settings: MergeGroup) -> str:
    """Write the whole model to the output folder, verified; what is said about it."""
    output = Path(settings.output)
    if output.exists():
        raise UsageError(f"--output {output} exists already; choose another folder")
    parts = find_parts(settings)
    config = _configuration(parts, settings)
    source = _weights(parts, config, settings)
    dtype = DTYPES[settings.param_dtype] if settings.param_dtype else None
    max_bytes = int(settings.max_shard_size * 1e9)
    with whole_folder(output) as written:
        _describe(parts, config, written, trust_remote_code=settings.trust_remote_code)
        num_files = write_shards(source, written, dtype=dtype, max_bytes=max_bytes)
        _set_dtype(written, source, dtype)
        verify_shards(source, written, dtype=dtype)
        checked = reload(written, config, max_bytes=max_bytes, trust_remote_code=settings.trust_remote_code)
    return f"{output}: {checked}, {num_files} {'file' if num_files == 1 else 'files'} of weights"


def find_parts(settings: MergeGroup) -> Parts:
    """What `model` stands for. UsageError, naming what would do, if it is nothing that can be merged."""
    path = Path(settings.model).expanduser()
    engine = _engine_folder(path)
    description = engine / DESCRIPTION if engine else adapter_folder(str(path))
    if description is None:
        raise UsageError(_why_nothing(path))
    base = None
    if (description / ADAPTER_FILE).is_file():
        base = resolve_model_path(settings.base) if settings.base else base_of(description, read_config(description))
        require_same_base(description, base, fingerprint(folder_of(base)))
    elif settings.base:
        raise UsageError(f"--base: {path} is a whole model, it has no other under it")
    return Parts(engine, description, folder_of(base) if base else None)


def _engine_folder(path: Path) -> Path | None:
    """The saved engine that a checkpoint, or a folder in one, stands for; verified."""
    checkpoint = path if (path / MANIFEST).is_file() else path.parent
    if not (checkpoint / MANIFEST).is_file():
        return None
    verify(checkpoint)
    engines = sorted(folder.parent for folder in checkpoint.glob(f"*/{DEEPSPEED}"))
    chosen = [engine for engine in engines if path in (checkpoint, engine)]
    if len(chosen) != 1:
        raise UsageError(f"--model {path} has several models: give one, {' or '.join(map(str, engines))}")
    if not (chosen[0] / DESCRIPTION / "config.json").is_file():
        raise UsageError(f"checkpoint {checkpoint} does not say what model it is of: it has no {DESCRIPTION}/")
    return chosen[0]


def _why_nothing(path: Path) -> str:
    if not path.is_dir():
        return f"--model {path}: there is no such folder"
    if checkpoints := sorted(path.glob(f"checkpoints/step_*/{MANIFEST}")):
        return f"--model {path} has no adapter; to turn a checkpoint into a model, give {checkpoints[-1].parent}"
    if (path / "config.json").is_file() or (path / "model" / "config.json").is_file():
        return f"--model {path} is a whole model already"
    return f"--model {path} is neither an adapter ({ADAPTER_FILE}) nor a checkpoint ({MANIFEST})"


def _configuration(parts: Parts, settings: MergeGroup) -> Any:
    """The configuration of the whole model, with the class that it is of."""
    from transformers import AutoConfig

    own = [parts.description / name for name in ("config.json", MODEL_FILE) if (parts.description / name).is_file()]
    if own:
        return AutoConfig.from_pretrained(own[0], trust_remote_code=settings.trust_remote_code)
    assert parts.base is not None, "a checkpoint has a configuration of its own"
    config = AutoConfig.from_pretrained(parts.base, trust_remote_code=settings.trust_remote_code)
    if num_labels := _foreign_head(parts.description):  # PEFT alone does not say what model it was
        config.num_labels = num_labels
        config.architectures = [f"{config.architectures[0].removesuffix('ForCausalLM')}ForSequenceClassification"]
    return config


def _foreign_head(folder: Path) -> int | None:
    """Outputs of the scalar head among an adapter's weights, if there is one."""
    weights = SafetensorsFiles([_adapter_file(folder)])
    name = file_name("score.weight")
    return weights.shape(name)[0] if name in weights.names() else None


def _adapter_file(folder: Path) -> Path:
    if not (folder / WEIGHTS_FILE).is_file():
        raise UsageError(f"adapter {folder} has no {WEIGHTS_FILE}")
    return folder / WEIGHTS_FILE


def _weights(parts: Parts, config: Any, settings: MergeGroup) -> TensorSource:
    if parts.engine is not None:
        tied = set() if parts.base else _tied_names(config, trust_remote_code=settings.trust_remote_code)
        trained: TensorSource = EngineWeights(parts.engine, config.dtype, tied=tied)
        if parts.base is None:
            return trained
        weights: TensorSource = RenamedTensors(trained, file_name)
    else:
        weights = SafetensorsFiles([_adapter_file(parts.description)])
    assert parts.base is not None, "an adapter has a base"
    return FoldedAdapter(open_weights(parts.base), weights, read_config(parts.description))


def _tied_names(config: Any, *, trust_remote_code: bool) -> set[str]:
    """Names that are other names of weights, and so not in files."""
    import torch

    with torch.device("meta"):
        model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return set(model.all_tied_weights_keys)


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    has_head = (config.architectures or [""])[0].endswith("ForSequenceClassification")
    return AutoModelForSequenceClassification if has_head else AutoModelForCausalLM


def _describe(parts: Parts, config: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Write configuration, tokenizer, template and generation settings."""
    from transformers import AutoTokenizer

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    if source := parts.file(TOKENIZER_FILES):
        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)
    if source := parts.file((GENERATION,)):
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    for code in parts.base.glob("*.py") if parts.base else ():
        shutil.copyfile(code, folder / code.name)


def _set_dtype(folder: Path, source: TensorSource, dtype: Any) -> None:
    """Say in the configuration of which type the weights are; transformers loads them in it."""
    file = folder / "config.json"
    written = str(dtype or source.dtype(source.names()[0])).removeprefix("torch.")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": written}, indent=2) + "\n")


def reload(folder: Path, config: Any, *, max_bytes: int, trust_remote_code: bool) -> str:
    """What transformers finds in the folder: every weight of the model, no other; up to that size, it also computes.

    Raises:
        RunError: it finds something else, or the model gives no finite numbers.
    """
    import torch

    small = sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= max_bytes
    model, report = _auto_class(config).from_pretrained(
        folder,
        dtype="auto",
        device_map=None if small else "meta",
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    wrong = {str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]}
    if wrong:
        raise RunError(f"transformers does not find the model in what was written: {len(wrong)} weights, {min(wrong)}")
    said = f"{model.num_parameters() / 1e6:.1f}M parameters in {str(model.dtype).removeprefix('torch.')}, reloaded"
    if not small:
        return said
    with torch.no_grad():
        outputs = model.base_model(input_ids=torch.tensor([TOKENS])).last_hidden_state
    if not torch.isfinite(outputs).all():
        raise RunError("the merged model gives numbers that are not finite")
    return f"{said} and run on {len(TOKENS)} tokens"
