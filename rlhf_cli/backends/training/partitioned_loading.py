"""Model loading under ZeRO-3: each weight is partitioned over the ranks when it is created."""

from contextlib import AbstractContextManager
from types import TracebackType

from deepspeed.runtime.zero import DeepSpeedTensorOverride, Init
from transformers.integrations import HfDeepSpeedConfig

from rlhf_cli.backends.training.deepspeed_config import deepspeed_config
from rlhf_cli.config.train import DeepSpeedConfig


def partitioned_loading(settings: DeepSpeedConfig, *, param_dtype: str) -> AbstractContextManager[None] | None:
    """Return a context manager for loading a model, or None if the settings do not partition weights."""
    if settings.zero_stage != 3:
        return None
    return _Partitioned(deepspeed_config(settings, param_dtype=param_dtype, max_norm=0.0))


class _Partitioned(AbstractContextManager[None]):
    """Partitions weights inside the block, without changing tensor dtypes."""

    def __init__(self, config: dict[str, object]) -> None:
        # transformers and PEFT look for a live HfDeepSpeedConfig (a weak reference). PEFT needs it after the block, to
        # gather the weights for DoRA's magnitudes, so this object keeps it alive.
        self._alive = HfDeepSpeedConfig(config)
        # With a live config, transformers enters `zero.Init` with default overrides, which would create every tensor in
        # the weights' dtype: rotary frequencies would be rounded to bfloat16, an error that grows with the position.
        # DeepSpeed applies only the outermost of nested `Init` contexts, which is this one. Parameters still get the
        # right dtype, because transformers sets torch's default dtype while it builds a model.
        self._init = Init(config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.device])

    def __enter__(self) -> None:
        self._init.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._init.__exit__(kind, error, trace)
