"""Loss of supervised fine-tuning."""

from typing import Literal

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup

SFTLoss = Literal["nll", "dft"]


class SFTLossConfig(SettingsGroup):
    """Loss"""

    loss: SFTLoss = "nll"
    """nll: negative log-likelihood per token. dft: the same times the token's probability, without gradient through
    it, so that unlikely tokens count less (arXiv 2508.05629).
    """
    neftune_noise_alpha: float = Field(0.0, ge=0)
    """Noise on the input embeddings in training: uniform, at most alpha / sqrt(L d) for L tokens of dimension d
    (NEFTune, arXiv 2310.05914, with 5 to 15). 0 adds none.
    """
