"""Teacher model for distillation: a frozen second model with a separate ZeRO stage."""

from collections.abc import Sequence

import torch

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import BUCKET_BYTES, whole_weights
from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.backends.training.sleep import HostCopies
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.distillation import TokenEvents
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.policy import TokenHead
from rlhf_cli.models.student import HiddenStateModel


class FrozenTeacher:
    """One rank's part of the teacher, with the full language model head, which every rank uses in each step.

    `events` are shared with a student that has another tokenizer.
    """

    def __init__(self, source: ModelConfig, settings: DeepSpeedConfig, events: TokenEvents | None = None) -> None:
        partition = partitioned_loading(settings, param_dtype=source.param_dtype)
        hf_model = load_causal_lm(source, device=distributed.device(), partition=partition)
        module = HiddenStateModel(hf_model, sequence_ranks(settings, hf_model.config))
        # The loss reads the head in every step, while the other weights are needed only for the teacher's forward pass.
        staying = module.head.parameters_used()
        self._engine = FrozenEngine(module, settings, param_dtype=source.param_dtype, staying=staying)
        self.events = None if events is None else events.to(distributed.device())
        self.head = _whole_head(module.head) if partition else module.head.weights()
        of_head = [part for part in (self.head.weight_VD, self.head.bias_V) if part is not None]
        self._of_head = HostCopies(of_head, pin=torch.cuda.is_available())

    def hidden_states(self, packs: Sequence[object]) -> list[torch.Tensor]:
        """Compute hidden states [k, D] at the positions that predict this rank's targets, for each pack, on the CPU."""
        return self._engine.infer(packs, lambda model, pack: model(pack))

    def sleep(self) -> None:
        """Move all weights to host memory."""
        self._engine.sleep()
        if torch.cuda.is_available():
            self._of_head.leave()

    def wake(self) -> None:
        """Move all weights back to the GPU."""
        self._engine.wake()
        self._of_head.come_back(distributed.device())


def _whole_head(head: TokenHead) -> HeadWeights:
    """Gather a copy of a partitioned head. Call it on all ranks."""
    partitioned = head.weights()
    named = [("weight", partitioned.weight_VD), ("bias", partitioned.bias_V)]
    present = [(name, parameter) for name, parameter in named if isinstance(parameter, torch.nn.Parameter)]
    whole = {name: weight.clone() for name, weight in whole_weights(present, gather=True, bucket_bytes=BUCKET_BYTES)}
    return HeadWeights(whole["weight"], whole.get("bias"), partitioned.transform)
