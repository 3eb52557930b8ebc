"""`rlhf why`: how a token or row entered the loss."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.replay import WhyGroup


class WhyConfig(CommandConfig):
    """Explain how a sampled response and its tokens changed the model: reward, advantage, ratio, clipping and gradient,
    as formulas with numbers. For a row of an offline command: the loss of each token.

    RUN is the run directory of a training command. The iteration or optimizer step runs again from its checkpoint, data
    and settings; the results are compared with the metrics and samples of the run.
    """

    positional = "run"

    why: WhyGroup
