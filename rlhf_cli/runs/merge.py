"""Implementation of `rlhf merge`: writes a merged model (`model_export.py`) and verifies it. Nothing is uploaded."""

from pathlib import Path

from rlhf_cli.backends.process.output_lock import new_output
from rlhf_cli.backends.training.checkpoint import MANIFEST
from rlhf_cli.commands.merge import MergeConfig, MergeGroup
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.finding import ADAPTER_FILE
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.runs.model_export import Parts, configuration, find_parts, read_back, write_whole

_TOKENS = tuple(range(1, 9))


def run_merge(settings: MergeGroup) -> str:
    """Write the merged model to the output folder and verify it. Returns a one-line summary."""
    output = Path(settings.output)
    with new_output(output):
        described = _write_merged(settings, output)
    return f"{output}: {described}"


def _write_merged(settings: MergeGroup, output: Path) -> str:
    parts = _parts(settings)
    config = configuration(parts, trust_remote_code=settings.trust_remote_code)
    # Shards in units of 10^9 bytes, as in transformers.
    max_bytes = int(settings.max_shard_size * 1e9)
    with whole_folder(output) as written:
        num_files = write_whole(
            parts,
            config,
            written,
            dtype=DTYPES[settings.param_dtype] if settings.param_dtype else None,
            max_bytes=max_bytes,
            trust_remote_code=settings.trust_remote_code,
        )
        checked = _reload(written, config, max_bytes=max_bytes, trust_remote_code=settings.trust_remote_code)
    return f"{checked}, {num_files} {'file' if num_files == 1 else 'files'} of weights"


def _parts(settings: MergeGroup) -> Parts:
    """Find the parts of the model. Raises UsageError if there is nothing to merge."""
    parts = find_parts(settings.model, flag="--model", base=settings.base)
    if parts is None:
        raise UsageError(_why_nothing(Path(settings.model).expanduser()))
    if settings.base and parts.base is None and parts.origin is None:
        raise UsageError(f"--base: {settings.model} is a full model without a base model")
    return parts


def _why_nothing(path: Path) -> str:
    if not path.is_dir():
        return f"--model {path}: there is no such folder"
    if checkpoints := sorted(path.glob(f"checkpoints/step_*/{MANIFEST}")):
        return f"--model {path} has no adapter; to convert a checkpoint to a model, pass {checkpoints[-1].parent}"
    if (path / "config.json").is_file() or (path / "model" / "config.json").is_file():
        return f"--model {path} is already a full model"
    return f"--model {path} is neither an adapter ({ADAPTER_FILE}) nor a checkpoint ({MANIFEST})"


def _reload(folder: Path, config: object, *, max_bytes: int, trust_remote_code: bool) -> str:
    """Load the folder with transformers to verify it. If it has at most `max_bytes`, also run a forward pass.

    Raises:
        RunError: the loaded model is incomplete, or the output is not finite.
    """
    import torch

    # A larger model may not fit in memory, so only its structure is checked.
    small = sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= max_bytes
    model = read_back(folder, config, device_map=None if small else "meta", trust_remote_code=trust_remote_code)
    described = f"{model.num_parameters() / 1e6:.1f}M parameters in {str(model.dtype).removeprefix('torch.')}, reloaded"
    if not small:
        return described
    with torch.no_grad():
        # The body without a head is called in the same way for all model classes.
        outputs = model.base_model(input_ids=torch.tensor([_TOKENS])).last_hidden_state
    if not torch.isfinite(outputs).all():
        raise RunError("the merged model's output is not finite")
    return f"{described} and run on {len(_TOKENS)} tokens"


def merge(config: MergeConfig) -> None:
    """Run `rlhf merge`."""
    print(run_merge(config.merge))
