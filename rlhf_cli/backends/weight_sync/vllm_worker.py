"""Weight transfer engines that run inside vLLM workers: they receive pushes and verify checksums.

Importing this module registers the engines. vLLM imports it in every worker, because `worker_extension_cls` refers to
WorkerExtension.
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

_ENGINE_NAMES = {"shm": "rlhf_shm", "nccl": "rlhf_nccl", "ipc": "rlhf_ipc"}


@dataclass
class _ShmInitInfo(WeightTransferInitInfo):
    """Empty: pushes are files, so no connection is needed."""


@dataclass
class _ShmUpdateInfo(WeightTransferUpdateInfo):
    """Push manifest."""

    version: int
    buckets: list[dict[str, object]]
    checksum: int
    num_tensors: int


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack language model heads that are tied to the embedding. No-op on a GPU.

    A push contains no tensor with the head's name, so vLLM's reload skips it. But vLLM's CPU build multiplies by a
    packed copy, which would keep the old weights forever.
    """
    for module in model.modules():
        # On a GPU, this method does nothing for unquantized embeddings.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Force the next reload to pack MoE expert weights for the CPU kernels.

    vLLM packs experts only while creating a layer's kernel. With an existing kernel, it copies plain weights into the
    packed tensors, and the kernel misreads them. GPU kernels do not pack weights.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


class ShmEngine(WeightTransferEngine[_ShmInitInfo, _ShmUpdateInfo]):
    """Loads pushes from shared memory. An invalid push leaves the weights unchanged."""

    init_info_cls = _ShmInitInfo
    update_info_cls = _ShmUpdateInfo
    pushed_checksum: int | None = None

    def init_transfer_engine(self, init_info: _ShmInitInfo) -> None:
        """No-op: files need no connection."""

    def start_weight_update(self) -> None:
        """No-op: the reload starts in `receive_weights`, after verification."""

    def update_weights(self, update_info: dict[str, object] | list[dict[str, object]]) -> None:
        """Receive a push."""
        # Overridden because the base class calls torch.accelerator.synchronize(), which fails in CPU builds.
        assert isinstance(update_info, dict)
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _ShmUpdateInfo) -> None:
        """Verify a push, then load it. Raises RunError if it is invalid."""
        expected = checkpoint_shapes(self.model_config.model)
        optional = optional_tensors(self.model_config.hf_config)
        named_tensors, checksum = read_verified_push(asdict(update_info), expected, optional=optional)
        _pack_experts_anew(self.model)
        # vLLM's CPU build packs linear weights, so load_weights must run inside a layerwise reload, which packs them
        # again.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(named_tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        self.pushed_checksum = checksum

    def finish_weight_update(self) -> None:
        """No-op: `receive_weights` has already finished the reload."""

    def shutdown(self) -> None:
        """No-op: this engine has no resources."""


class _WatchedNcclEngine(Watching, Reconnecting, NCCLWeightTransferEngine):
    """vLLM's nccl engine, with verification and reconnection."""


class _WatchedIpcEngine(Watching, IPCWeightTransferEngine):
    """vLLM's ipc engine, with verification."""


WeightTransferEngineFactory.register_engine(_ENGINE_NAMES["shm"], ShmEngine)
WeightTransferEngineFactory.register_engine(_ENGINE_NAMES["nccl"], _WatchedNcclEngine)
WeightTransferEngineFactory.register_engine(_ENGINE_NAMES["ipc"], _WatchedIpcEngine)


def _names_are_checked(record: logging.LogRecord) -> bool:
    """Filter vLLM's warning about layers without pushed weights, such as rotary tables and tied heads.

    The warning is redundant: each push is checked against the checkpoint's names, and vLLM restores these layers.
    """
    return "Failed to load weights" not in record.msg


# At import, because vLLM has no hook for code at worker startup.
prepare_amx()
end_with_owner()
logging.getLogger(layerwise.__name__).addFilter(_names_are_checked)


class WorkerExtension:
    """Worker methods in addition to vLLM's, called through `collective_rpc`."""

    weight_transfer_engine: Any

    def pushed_checksum(self) -> int | None:
        """Return the checksum of the last push as received by this worker, or None before the first."""
        return self.weight_transfer_engine.pushed_checksum
