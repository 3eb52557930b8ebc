"""Reads weights from a saved DeepSpeed engine at any ZeRO stage, one tensor at a time, with Hugging Face names.

The result equals the weights used in training: fp32 master weights are rounded to the run's dtype.
"""

import contextlib
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED
from rlhf_cli.backends.training.saved_states import PARTITIONED, WHOLE, SavedStates
from rlhf_cli.errors import UsageError

DESCRIPTION = "huggingface"
"""Sibling folder with the Hugging Face files except weights."""
_SPLIT = "*mp_rank_01_model_states.pt"
"""Files that exist only with tensor parallelism: the second tensor-parallel rank's, at any stage."""
_WRAPPER = "model."
"""Prefix of all keys before the Hugging Face name: the attribute in PolicyModel and ValueModel."""


class EngineWeights:
    """Tensors of a saved engine, assembled on access from memory-mapped files."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, tied: Collection[str] = ()) -> None:
        """Open a saved engine. `tied` names are excluded.

        `dtype` is the run's dtype. It is used at stage 3 and with tensor parallelism, where only fp32 weights are
        saved.
        """
        self._tied = tied
        self._dtype: torch.dtype | None = None
        folder = directory / DEEPSPEED
        if next(folder.glob(_SPLIT), None) is not None:
            self._dtype, self._tensors = dtype, _split(SavedStates(directory))
        elif (folder / PARTITIONED).is_file():
            self._dtype = dtype
            self._tensors = _partitioned(directory)
        elif (folder / WHOLE).is_file():
            self._tensors = torch.load(folder / WHOLE, map_location="cpu", mmap=True, weights_only=False)["module"]
        else:
            raise UsageError(f"{directory} is not a checkpoint: {folder} contains no model states")

    def names(self) -> list[str]:
        return [name for key in self._tensors if (name := key.removeprefix(_WRAPPER)) not in self._tied]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[_WRAPPER + name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._tensors[_WRAPPER + name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[_WRAPPER + name].contiguous().to(self.dtype(name))


def _split(states: SavedStates) -> dict[str, Any]:
    """Return tensor-parallel weights by name. `contiguous` assembles a tensor."""
    return {name: _SplitTensor(states, name) for name in states.names()} | states.buffers()


class _SplitTensor:
    """A parameter saved in parts by tensor-parallel ranks."""

    def __init__(self, states: SavedStates, name: str) -> None:
        self._states, self._name = states, name
        self.shape = states.shape(name)

    def contiguous(self) -> torch.Tensor:
        """Assemble the full parameter."""
        return self._states.joined(self._name)


def _partitioned(directory: Path) -> dict[str, Any]:
    """Return weights saved at stage 3 by name. `contiguous` assembles a tensor from the ranks' memory-mapped files."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # DeepSpeed prints progress to stdout and stderr.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=DEEPSPEED, lazy_mode=True)
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(f"{directory}: the weights cannot be assembled from the ranks' files: {error}") from error
