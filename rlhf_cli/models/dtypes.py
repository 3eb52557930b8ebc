"""Weight dtypes."""

import torch

from rlhf_cli.config.model import ModelSource
from rlhf_cli.environment import fast_dtype
from rlhf_cli.models.compat import has_bf16_products

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_BF16 = "bf16 matmul is slow on this processor: use --param_dtype fp32, which is many times faster here"


def dtype_note(config: ModelSource, *, on_gpu: bool) -> dict[str, str]:
    """Return a labeled terminal line: why the dtype was chosen, or that the requested dtype is slow here."""
    if "param_dtype" not in config.model_fields_set:
        return {"Type": f"{config.param_dtype}: {fast_dtype()[1]}"}
    is_slow = config.param_dtype == "bf16" and not on_gpu and not has_bf16_products()
    return {"Note": SLOW_BF16} if is_slow else {}
