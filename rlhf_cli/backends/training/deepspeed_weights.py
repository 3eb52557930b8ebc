"""Weights of a saved engine, at any ZeRO stage, read one tensor at a time under the names of the Hugging Face model.

They are the weights the model computed with: float32 copies of the optimizer are rounded to the type of the run.
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
"""Folder beside it with a Hugging Face folder's files besides weights."""
SPLIT = "*mp_rank_01_model_states.pt"
"""Files of the second of the ranks that split layers, at any stage."""
WRAPPER = "model."
"""Before the Hugging Face name in every key: the attribute of PolicyModel and ValueModel."""


class EngineWeights:
    """Tensors of a saved engine: parts of mapped files that are put together when they are asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, tied: Collection[str] = ()) -> None:
        """`dtype` is the type of the run, for stage 3 keeps float32 copies alone; `tied` names are left out."""
        self._tied = tied
        self._dtype: torch.dtype | None = None
        folder = directory / DEEPSPEED
        if next(folder.glob(SPLIT), None) is not None:
            self._dtype, self._tensors = dtype, _split(SavedStates(directory))
        elif (folder / PARTITIONED).is_file():
            self._dtype = dtype
            self._tensors = _partitioned(directory)
        elif (folder / WHOLE).is_file():
            self._tensors = torch.load(folder / WHOLE, map_location="cpu", mmap=True, weights_only=False)["module"]
        else:
            raise UsageError(f"{directory} is no saved model of a checkpoint: {folder} has no model states")

    def names(self) -> list[str]:
        return [name for key in self._tensors if (name := key.removeprefix(WRAPPER)) not in self._tied]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[WRAPPER + name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._tensors[WRAPPER + name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[WRAPPER + name].contiguous().to(self.dtype(name))


def _split(states: SavedStates) -> dict[str, Any]:
    """Return the tensors of ranks that split layers by name, put together by `contiguous`."""
    return {name: _SplitTensor(states, name) for name in states.names()} | states.buffers()


class _SplitTensor:
    """A parameter of which ranks have saved parts."""

    def __init__(self, states: SavedStates, name: str) -> None:
        self._states, self._name = states, name
        self.shape = states.shape(name)

    def contiguous(self) -> torch.Tensor:
        """Return the whole parameter."""
        return self._states.joined(self._name)


def _partitioned(directory: Path) -> dict[str, Any]:
    """Return the tensors of stage 3 by name, put together from the ranks' mapped files by `contiguous`."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=DEEPSPEED, lazy_mode=True)
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(f"{directory} cannot be put together from the files of its ranks: {error}") from error
