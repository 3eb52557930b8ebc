"""The number types of weights."""

import torch

from rlhf_cli.config.model import ModelSource
from rlhf_cli.models.compat import has_bf16_products

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_BF16 = "this processor has no fast bf16 products: --param_dtype fp32 is many times faster here"


def dtype_note(config: ModelSource) -> dict[str, str]:
    """Return a line for the terminal, by its name, where models that run in this process would be slow in their
    type.
    """
    is_slow = config.param_dtype == "bf16" and not has_bf16_products()
    return {"Note": SLOW_BF16} if is_slow and not torch.cuda.is_available() else {}
