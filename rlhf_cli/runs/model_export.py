"""Exports adapters and checkpoints as full models: finds the parts, writes the model, and reads it back."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.backends.training.checkpoint import MANIFEST, verify
from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED
from rlhf_cli.backends.training.deepspeed_weights import DESCRIPTION, EngineWeights
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapter_parts import require_whole_precision
from rlhf_cli.models.adapters import (
    MODEL_FILE,
    WEIGHTS_FILE,
    base_of,
    file_name,
    read_config,
    require_same_base,
)
from rlhf_cli.models.checkpoint_names import CheckpointTensors, in_memory_names
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, resolve_model_path
from rlhf_cli.models.merging import FoldedAdapter, verify_shards, write_shards
from rlhf_cli.models.mixers.remainders import SummedTensors
from rlhf_cli.models.saving import PROCESSOR_FILES, copy_processor_files
from rlhf_cli.models.tokenizers import TOKENIZER_FILES
from rlhf_cli.models.unused_weights import restore_unused_weights
from rlhf_cli.models.vision.families.table import is_multimodal
from rlhf_cli.models.vision.freezing import origin_of
from rlhf_cli.models.weight_files import (
    ConvertedTensors,
    JoinedTensors,
    RenamedTensors,
    SafetensorsFiles,
    TensorSource,
    fingerprint,
    folder_of,
    open_weights,
)

GENERATION = "generation_config.json"
_SHARD_BYTES = 4_000_000_000
# Other settings, such as dropout, apply only in training.
_SCALING = ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out")
"""Adapter settings that change the merged weights for the same factors."""


@dataclass(frozen=True)
class Parts:
    """Locations of a model's parts."""

    # Saved engine in a checkpoint; None for an adapter folder.
    engine: Path | None
    # Folder with configuration and tokenizer, including the adapter's.
    description: Path
    # Base model of the adapter; None without an adapter.
    base: Path | None
    # Model with a checkpoint's frozen parts; None if everything was trained.
    origin: Path | None = None

    def file(self, names: tuple[str, ...]) -> Path | None:
        """Return the folder that contains any of these files: the model's folder, or the base model."""
        # An adapter's own file takes precedence over the base model's.
        folders = [self.description, *([self.base] if self.base else [])]
        return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)

    def fingerprint(self) -> str:
        """Return a hash of the weights: of adapter and base model, or of the checkpoint's content."""
        # The manifest contains checksums of all files, so hashing it is enough.
        own = self.engine.parent / MANIFEST if self.engine else _adapter_file(self.description)
        digest = hashlib.sha256(f"{self.engine.name if self.engine else ''} ".encode() + own.read_bytes())
        if self.base is not None:
            adapter = read_config(self.description)
            digest.update(f"{fingerprint(self.base)} {[getattr(adapter, name) for name in _SCALING]}".encode())
        return digest.hexdigest()[:32]


def find_parts(model: str, *, flag: str, base: str | None = None) -> Parts | None:
    """Find the parts of a model; None if it is neither an adapter nor a checkpoint.

    Args:
        model: path, as passed to `flag`.
        flag: name of the flag.
        base: new location of the adapter's base model, or of the model with a checkpoint's frozen parts, if it has
            moved since training.

    Raises:
        UsageError: the checkpoint is damaged or contains multiple models, or the base model is missing or has changed.
    """
    path = Path(model).expanduser()
    engine = _engine_folder(path, flag)
    description = engine / DESCRIPTION if engine else adapter_folder(str(path))
    if description is None:
        return None
    under = None
    if (description / ADAPTER_FILE).is_file():
        under = resolve_model_path(base) if base else base_of(description, read_config(description))
        require_whole_precision(description, folder_of(under))
        require_same_base(description, under, fingerprint(folder_of(under)))
    return Parts(engine, description, folder_of(under) if under else None, origin_of(description, moved_to=base))


def _engine_folder(path: Path, flag: str) -> Path | None:
    """Return the verified engine in a checkpoint, or in a folder inside one; None if it is not a checkpoint."""
    checkpoint = path.parent if (path / DEEPSPEED).is_dir() else path
    engines = sorted(folder.parent for folder in checkpoint.glob(f"*/{DEEPSPEED}"))
    if not engines or not (checkpoint / MANIFEST).is_file():
        return None
    verify(checkpoint)
    # An online run's checkpoint contains several models; the path may name one of them.
    chosen = [engine for engine in engines if path in (checkpoint, engine)]
    if len(chosen) != 1:
        raise UsageError(f"{flag} {path} contains multiple models: pass {' or '.join(map(str, engines))}")
    if not (chosen[0] / DESCRIPTION / "config.json").is_file():
        raise UsageError(f"checkpoint {checkpoint} has no model configuration: {DESCRIPTION}/ is missing")
    return chosen[0]


def configuration(parts: Parts, *, trust_remote_code: bool) -> object:
    """Return the full model's configuration, including the model class."""
    from transformers import AutoConfig

    own = [parts.description / name for name in ("config.json", MODEL_FILE) if (parts.description / name).is_file()]
    if own:
        return AutoConfig.from_pretrained(own[0], trust_remote_code=trust_remote_code)
    assert parts.base is not None, "a checkpoint has a configuration"
    config = AutoConfig.from_pretrained(parts.base, trust_remote_code=trust_remote_code)
    _separate_head(config, parts.description)
    # An adapter saved by PEFT does not record the model class, so detect a scalar head from the weights.
    if num_labels := _foreign_head(parts.description):
        config.num_labels = num_labels
        config.architectures = [f"{config.architectures[0].removesuffix('ForCausalLM')}ForSequenceClassification"]
    return config


def whole_weights(parts: Parts, config: Any, *, trust_remote_code: bool) -> TensorSource:
    """Return the full model's tensors. Raises UsageError if the adapter does not match the base model."""
    if parts.base is not None:
        weights, settings = adapter_weights(parts, config), read_config(parts.description)
        if not is_multimodal(config):
            return FoldedAdapter(open_weights(parts.base), weights, settings)
        model = _without_weights(config, trust_remote_code=trust_remote_code)
        base = in_memory_names(open_weights(parts.base), model)
        return CheckpointTensors(FoldedAdapter(base, weights, settings), model)
    assert parts.engine is not None, "without a base model, it is a checkpoint"
    return _checkpoint_weights(parts.engine, parts.origin, config, trust_remote_code=trust_remote_code)


def adapter_weights(parts: Parts, config: Any) -> TensorSource:
    """Return only the adapter's tensors, with the names in PEFT's files."""
    if parts.engine is None:
        return SafetensorsFiles([_adapter_file(parts.description)])
    return RenamedTensors(EngineWeights(parts.engine, config.dtype), file_name)


def write_whole(
    parts: Parts,
    config: object,
    folder: Path,
    *,
    dtype: object = None,
    max_bytes: int = _SHARD_BYTES,
    trust_remote_code: bool = False,
) -> int:
    """Write the full model to an empty folder. Returns the number of weight files.

    Args:
        parts: locations of the parts.
        config: configuration of the full model.
        folder: the empty folder.
        dtype: torch.dtype for the weights; by default unchanged.
        max_bytes: shard size.
        trust_remote_code: whether to run model code from the folder.
    """
    source = whole_weights(parts, config, trust_remote_code=trust_remote_code)
    _describe(parts, config, folder, trust_remote_code=trust_remote_code)
    num_files = write_shards(source, folder, dtype=dtype, max_bytes=max_bytes)
    _set_dtype(folder, source, dtype)
    verify_shards(source, folder, dtype=dtype)
    if parts.engine is not None and parts.base is None:
        model = _without_weights(config, trust_remote_code=trust_remote_code)
        restore_unused_weights(model, parts.description, folder)
    return num_files


def read_back(folder: Path, config: object, *, device_map: str | None, trust_remote_code: bool) -> Any:
    """Return the model as transformers loads it from the folder; on the device "meta" without its weights.

    Raises:
        RunError: the folder lacks weights of the model, or has others.
    """
    model, report = _auto_class(config).from_pretrained(
        folder,
        dtype="auto",
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        # transformers only warns about missing weights, which it initializes randomly.
        output_loading_info=True,
    )
    wrong = {str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]}
    if wrong:
        raise RunError(f"transformers does not find the model in what was written: {len(wrong)} weights, {min(wrong)}")
    return model


def _separate_head(config: Any, folder: Path) -> None:
    """Untie the head from the embedding if the adapter in the folder trains the head as a separate layer.

    Raises:
        UsageError: it trains the embedding alone, while PEFT leaves the head as it was.
    """
    adapter = read_config(folder)
    if not config.tie_word_embeddings or getattr(adapter, "ensure_weight_tying", False):
        return
    whole = {name.rsplit(".", 1)[-1] for name in adapter.modules_to_save or ()}
    if "lm_head" in whole:
        config.tie_word_embeddings = False
    elif "embed_tokens" in whole:
        raise UsageError(
            f"adapter {folder} trains the embedding of a model whose head has the same weight, and leaves the head "
            "as it was: train it with modules_to_save embed_tokens,lm_head or with PEFT's ensure_weight_tying"
        )


def _foreign_head(folder: Path) -> int | None:
    """Return the outputs of the scalar head among an adapter's weights, if any."""
    weights = SafetensorsFiles([_adapter_file(folder)])
    name = file_name("score.weight")
    return weights.shape(name)[0] if name in weights.names() else None


def _adapter_file(folder: Path) -> Path:
    if not (folder / WEIGHTS_FILE).is_file():
        raise UsageError(f"adapter {folder} has no {WEIGHTS_FILE}")
    return folder / WEIGHTS_FILE


def _checkpoint_weights(engine: Path, origin: Path | None, config: Any, *, trust_remote_code: bool) -> TensorSource:
    """Return a saved engine's tensors with the names in model files, in which tied weights appear once.

    Frozen parts are read from `origin` and converted to the run's dtype.
    """
    model = _without_weights(config, trust_remote_code=trust_remote_code)
    tied = set(model.all_tied_weights_keys)
    weights: TensorSource = SummedTensors(EngineWeights(engine, config.dtype, tied=tied), engine / DESCRIPTION)
    if origin is not None:
        frozen = {name for name, _ in model.named_parameters()} - set(weights.names()) - tied
        # Files may use older names than the modules, such as for vision towers.
        others = in_memory_names(open_weights(origin), model)
        weights = JoinedTensors(weights, ConvertedTensors(others, sorted(frozen), config.dtype))
    return CheckpointTensors(weights, model)


def _without_weights(config: Any, *, trust_remote_code: bool) -> Any:
    """Create the model on the meta device, for names and shapes."""
    import torch

    # The meta device allocates nothing, so this works for models of any size.
    with torch.device("meta"):
        return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def _describe(parts: Parts, config: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Write configuration, tokenizer, template and generation settings."""
    from transformers import AutoTokenizer

    # The written weights are not quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    if source := parts.file(TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, mistral_format=False)
        tokenizer.save_pretrained(folder)
    if source := parts.file((GENERATION,)):
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    if source := parts.file(PROCESSOR_FILES):
        copy_processor_files(source, folder)
    # Remote code of the base model must be next to its configuration.
    for code in parts.base.glob("*.py") if parts.base else ():
        shutil.copyfile(code, folder / code.name)


def _set_dtype(folder: Path, source: TensorSource, dtype: object) -> None:
    """Set the weights' dtype in the configuration, which transformers uses for loading."""
    file = folder / "config.json"
    written = str(dtype or source.dtype(source.names()[0])).removeprefix("torch.")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": written}, indent=2) + "\n")


def _auto_class(config: Any) -> Any:
    """Return the transformers model class for this configuration: sequence classifier or language model."""
    from rlhf_cli.models.loading import language_model_class
    from rlhf_cli.models.score_heads import sequence_classifier_class

    has_head = (config.architectures or [""])[0].endswith("ForSequenceClassification")
    return sequence_classifier_class(config) if has_head else language_model_class(config)
