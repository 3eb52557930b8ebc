"""Loading under ZeRO-3: every weight is partitioned over the ranks as soon as it exists."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from deepspeed.runtime.zero import DeepSpeedTensorOverride, Init
from transformers.integrations import HfDeepSpeedConfig

from rlhf_cli.backends.training.deepspeed_config import deepspeed_config
from rlhf_cli.config.train import DeepSpeedConfig


def partitioned_loading(settings: DeepSpeedConfig, *, param_dtype: str) -> AbstractContextManager[None] | None:
    """Return the context to load a model in, or None if these settings do not partition weights."""
    if settings.zero_stage != 3:
        return None
    return _partitioned(deepspeed_config(settings, param_dtype=param_dtype, max_norm=0.0))


@contextmanager
def _partitioned(config: dict[str, object]) -> Iterator[None]:
    """Partition within the block, and leave the types of tensors alone.

    transformers looks for a live HfDeepSpeedConfig and enters `zero.Init` by itself. That would create every tensor in
    the type of the weights: rotary frequencies, which are float32 in every other engine, would be rounded to bfloat16,
    an error that grows with the position. DeepSpeed applies the outermost of nested contexts, which is this one.
    Parameters still get the type of the weights: it is torch's default type while transformers builds a model.
    """
    alive = HfDeepSpeedConfig(config)
    with Init(config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.device]):
        yield
    del alive
