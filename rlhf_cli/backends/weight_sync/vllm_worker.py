"""What runs inside vLLM's workers: engines that receive pushes and prove what arrived.

Importing this module registers the engines; vLLM imports it in every worker because WorkerExtension is named in
`worker_extension_cls`. Leaves out the trainer's side.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.platforms import current_platform

from rlhf_cli.backends.rollout.processes import end_with_owner
from rlhf_cli.backends.weight_sync.shm import read_verified_push
from rlhf_cli.backends.weight_sync.transfer import checkpoint_shapes, optional_tensors
from rlhf_cli.backends.weight_sync.vllm_checksum import Reconnecting, Watching
from rlhf_cli.models.compat import prepare_amx

ENGINE_NAMES = {"shm": "rlhf_shm", "nccl": "rlhf_nccl", "ipc": "rlhf_ipc"}


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Pushes are files: nothing to agree on."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """A push's manifest."""

    version: int
    buckets: list[dict[str, object]]
    checksum: int
    num_tensors: int


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads again that share the embedding's weight.

    No tensor of a push carries their name, so the reload leaves them alone; but the CPU build multiplies with a packed
    copy, which would stay the former weights for good. Does nothing on a GPU.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Make the next reload pack the experts of a mixture for the CPU build's kernels.

    vLLM packs them only when it builds a layer's kernel. Later loads of an existing kernel copy plain weights into the
    packed tensors, which the kernel then reads as other weights. A GPU's kernels have no such step.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


class ShmEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads pushes from shared memory; a push that is found wrong leaves the weights as they were."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    pushed_checksum: int | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do before the push was verified."""

    def update_weights(self, update_info: dict[str, object] | list[dict[str, object]]) -> None:
        """Update weights as the base class does, whose torch.accelerator.synchronize() a CPU build lacks."""
        assert isinstance(update_info, dict)
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Verify, then loads. The CPU build re-packs linear weights, hence the layerwise reload around it."""
        expected = checkpoint_shapes(self.model_config.model)
        optional = optional_tensors(self.model_config.hf_config)
        named_tensors, checksum = read_verified_push(asdict(update_info), expected, optional=optional)
        _pack_experts_anew(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(named_tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        self.pushed_checksum = checksum

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Do nothing: this engine holds nothing."""


class WatchedNcclEngine(Watching, Reconnecting, NCCLWeightTransferEngine):
    """vLLM's nccl engine with a ledger, which may be connected again."""


class WatchedIpcEngine(Watching, IPCWeightTransferEngine):
    """vLLM's ipc engine with a ledger."""


WeightTransferEngineFactory.register_engine(ENGINE_NAMES["shm"], ShmEngine)
WeightTransferEngineFactory.register_engine(ENGINE_NAMES["nccl"], WatchedNcclEngine)
WeightTransferEngineFactory.register_engine(ENGINE_NAMES["ipc"], WatchedIpcEngine)


def _names_are_checked(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning about layers without weights in a push, such as rotary tables and tied heads.

    Every push is compared with the checkpoint's names here, and vLLM puts the former tensors of such layers back.
    """
    return "Failed to load weights" not in record.msg


prepare_amx()
end_with_owner()
logging.getLogger(layerwise.__name__).addFilter(_names_are_checked)


class WorkerExtension:
    """What an engine can ask of its workers besides vLLM's own calls."""

    weight_transfer_engine: Any

    def pushed_checksum(self) -> int | None:
        """Checksum of the last push as it arrived in this worker, None before the first."""
        return self.weight_transfer_engine.pushed_checksum
