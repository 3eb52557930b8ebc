"""The teacher of distillation: a second model that is only asked, with a ZeRO stage of its own."""

from collections.abc import Sequence

import torch

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import BUCKET_BYTES, FrozenEngine, whole_weights
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.backends.training.sleep import HostCopies
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.policy import TokenHead
from rlhf_cli.models.student import HiddenStateModel


class FrozenTeacher:
    """Owns one rank's share of the teacher, and its whole head, which every rank needs in each step."""

    def __init__(self, source: ModelConfig, settings: DeepSpeedConfig) -> None:
        partition = partitioned_loading(settings, param_dtype=source.param_dtype)
        hf_model = load_causal_lm(source, device=distributed.device(), partition=partition)
        module = HiddenStateModel(hf_model, sequence_ranks(settings, hf_model.config))
        staying = module.head.parameters_used()  # the objective reads them in every step, beside the student
        self._engine = FrozenEngine(module, settings, param_dtype=source.param_dtype, staying=staying)
        self.head = whole_head(module.head) if partition else module.head.weights()
        of_head = [part for part in (self.head.weight_VD, self.head.bias_V) if part is not None]
        self._of_head = HostCopies(of_head, pin=torch.cuda.is_available())

    def hidden_states(self, packs: Sequence[object]) -> list[torch.Tensor]:
        """Return the states [k, D] that predict this rank's targets of each pack, on the CPU."""
        return self._engine.infer(packs, lambda model, pack: model(pack))

    def sleep(self) -> None:
        """Leave the accelerator to others."""
        self._engine.sleep()
        if torch.cuda.is_available():
            self._of_head.leave()

    def wake(self) -> None:
        """Be ready to compute."""
        self._engine.wake()
        self._of_head.come_back(distributed.device())


def whole_head(head: TokenHead) -> HeadWeights:
    """Return a copy of a partitioned head; every rank must call it."""
    partitioned = head.weights()
    named = [("weight", partitioned.weight_VD), ("bias", partitioned.bias_V)]
    present = [(name, parameter) for name, parameter in named if isinstance(parameter, torch.nn.Parameter)]
    whole = {name: weight.clone() for name, weight in whole_weights(present, gather=True, bucket_bytes=BUCKET_BYTES)}
    return HeadWeights(whole["weight"], whole.get("bias"), partitioned.transform)
