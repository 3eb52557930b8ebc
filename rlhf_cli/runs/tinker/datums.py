"""Checks of training data from clients."""

import numpy as np

from rlhf_cli.algorithms.tinker_losses import TARGETS, TinkerLoss
from rlhf_cli.backends.training.adapter_trainer import Datum
from rlhf_cli.errors import UsageError


def check_tokens(token_ids: np.ndarray, where: str, vocab_size: int) -> None:
    """Raise UsageError for a token id outside the vocabulary."""
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        raise UsageError(f"{where} contains a token id outside the vocabulary, 0 to {vocab_size - 1}")


def check_datum(datum: Datum, where: str, loss: TinkerLoss, *, max_len: int, vocab_size: int) -> None:
    """Raise UsageError unless a datum has the inputs of the loss, with matching shapes."""
    length = len(datum.token_ids)
    if not 0 < length <= max_len:
        raise UsageError(f"{where} has {length} tokens; between 1 and {max_len} (--max_len) are supported")
    needed = {TARGETS, *loss.inputs}
    if missing := needed - datum.inputs.keys():
        raise UsageError(f"{where}: loss_fn_inputs lacks {min(missing)}")
    if extra := datum.inputs.keys() - needed:
        raise UsageError(f"{where}: loss_fn_inputs has {min(extra)}, which this loss does not read")
    targets = datum.inputs[TARGETS]
    if targets.ndim not in (1, 2) or len(targets) != length or not targets.size:
        raise UsageError(f"{where}: target_tokens has shape {targets.shape}, not ({length},) or ({length}, K)")
    if targets.dtype.kind != "i":
        raise UsageError(f"{where}: target_tokens must be int64")
    for name in loss.inputs:
        values = datum.inputs[name]
        if values.shape != targets.shape or values.dtype.kind != "f":
            raise UsageError(f"{where}: {name} must be float32 of shape {targets.shape}, like target_tokens")
        if not np.isfinite(values).all():
            raise UsageError(f"{where}: {name} contains NaN or infinity")
    check_tokens(datum.token_ids, f"{where}: model_input", vocab_size)
    check_tokens(targets, f"{where}: target_tokens", vocab_size)
