"""Loading under ZeRO-3: every weight is partitioned over the ranks as soon as it exists."""

from contextlib import AbstractContextManager
from types import TracebackType

from deepspeed.runtime.zero import DeepSpeedTensorOverride, Init
from transformers.integrations import HfDeepSpeedConfig

from rlhf_cli.backends.training.deepspeed_config import deepspeed_config
from rlhf_cli.config.train import DeepSpeedConfig


def partitioned_loading(settings: DeepSpeedConfig, *, param_dtype: str) -> AbstractContextManager[None] | None:
    """Return the context to load a model in, or None if these settings do not partition weights."""
    if settings.zero_stage != 3:
        return None
    return _Partitioned(deepspeed_config(settings, param_dtype=param_dtype, max_norm=0.0))


class _Partitioned(AbstractContextManager[None]):
    """Partitions within its block, and leaves the types of tensors alone.

    transformers looks for a live HfDeepSpeedConfig and enters `zero.Init` by itself. That would create every tensor in
    the type of the weights: rotary frequencies, which are float32 in every other engine, would be rounded to bfloat16,
    an error that grows with the position. DeepSpeed applies the outermost of nested contexts, which is this one.
    Parameters still get the type of the weights: it is torch's default type while transformers builds a model.

    The HfDeepSpeedConfig lives as long as this object, longer than the block: PEFT looks for it too, to gather the
    weights whose rows DoRA measures when an adapter is put on.
    """

    def __init__(self, config: dict[str, object]) -> None:
        self._alive = HfDeepSpeedConfig(config)
        self._init = Init(config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.device])

    def __enter__(self) -> None:
        self._init.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._init.__exit__(kind, error, trace)
