"""Trainer side for nccl and ipc pushes, based on vLLM's trainer engines.

vLLM's trainer engine controls the inference side through a client with four blocking methods. EngineClient implements
these for multiple engines.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlhf_cli.backends.weight_sync.transfer import NamedTensors
from rlhf_cli.errors import RunError
from rlhf_cli.models.checkpoint_names import persistent_buffers, shapes_in_checkpoint
from rlhf_cli.models.merging import parameters_without_adapter
from rlhf_cli.models.mixers.remainders import remainders
from rlhf_cli.models.quantised import dense_layout

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    from rlhf_cli.backends.rollout.engine_host import EngineHost

# Bounds the extra GPU memory per buffer on both sides; vLLM's default of 1 GiB is too much next to a training model.
_BUFFER_BYTES = 256 << 20

HostCall = Callable[["EngineHost", Any], Awaitable[object]]
CallEngines = Callable[[HostCall, Sequence[object]], None]
"""Calls a function on every engine host, each with one value from the sequence, and waits for all."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Tensor metadata sent to the engines before gathering; `shape` is the full, unpartitioned shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_specs(hf_model: Any) -> list[TensorSpec]:
    """List the tensors in push order, without gathering weights under ZeRO-3."""
    named = [*parameters_without_adapter(hf_model), *persistent_buffers(hf_model)]
    in_float32 = remainders(hf_model)
    return [
        TensorSpec(name, torch.float32 if own_name in in_float32 else dtype, shape)
        for own_name, tensor in named
        for own_shape, dtype in [dense_layout(tensor)]
        for name, shape in shapes_in_checkpoint(hf_model, own_name, own_shape, dtype).items()
    ]


class EngineClient:
    """Implements vLLM's VLLMWeightSyncClient for multiple engines."""

    def __init__(self, call_engines: CallEngines, *, num_engines: int, ranks_per_engine: int = 1) -> None:
        self._call = call_engines
        self._num_engines = num_engines
        self._ranks_per_engine = ranks_per_engine
        self.version = 0

    @property
    def num_workers(self) -> int:
        """Number of workers in all engines, which form the inference side of the NCCL group."""
        return self._num_engines * self._ranks_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all engines. In an NCCL group, engines occupy consecutive rank ranges."""
        infos = []
        for index in range(self._num_engines):
            info = dict(init_info)
            # vLLM always sends offset 1 (after the sender), because its client assumes a single engine.
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
            infos.append(info)
        self._call(lambda host, info: host.engine.init_weight_transfer(info), infos)

    def start_weight_update(self) -> None:
        """Open the update on all engines."""
        self._call(lambda host, _: host.engine.start_weight_update(), [None] * self._num_engines)

    def update_weights(self, update_info: object) -> None:
        """Receive on all engines, and wait until all are done."""
        self._call(lambda host, info: host.engine.update_weights(info), [update_info] * self._num_engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on all engines, with this push's version."""
        self._call(lambda host, version: host.engine.finish_weight_update(version), [self.version] * self._num_engines)


class PushSource:
    """Implements vLLM's WeightSource. Set `named_tensors` before each push."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self._specs = specs
        self.named_tensors: NamedTensors = ()

    def metadata(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes in push order, without gathering."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the tensors."""
        for name, tensor in self.named_tensors:
            # vLLM collects tensors until a buffer is full and only then packs them. By that time, ZeRO-3 has
            # partitioned the gathered weights again.
            yield name, tensor.clone()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """NCCL rendezvous for sender and engine workers: the sender's address and a free port."""

    address: str
    port: int


def buffer_bytes(specs: list[TensorSpec]) -> int:
    """Compute the packing buffer size, which must fit the largest tensor."""
    # vLLM's ipc engine copies each packed chunk into a buffer of this size and fails if a tensor is larger.
    sizes = [spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs]
    return max(_BUFFER_BYTES, *sizes)


def _trainer_init_info(
    backend: Literal["nccl", "ipc"], *, rank: int, num_workers: int, buffer_size: int, rendezvous: Rendezvous | None
) -> "TrainerInitInfo":
    """Create vLLM's init info for this trainer rank; rank 0 sends."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_size)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if rendezvous is None:
        raise RunError("weight push: nccl requires a rendezvous address and port")
    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=rendezvous.address,
        master_port=rendezvous.port,
        # Only rank 0 joins the NCCL group; the other trainer ranks only gather.
        world_size=1 + num_workers,
        packed=True,
        packed_buffer_size_bytes=buffer_size,
    )


class VllmTransport:
    """Sends pushes through vLLM's trainer engine. Used on every trainer rank."""

    def __init__(self, engine: "TrainerWeightTransferEngine[Any]", source: PushSource, client: EngineClient) -> None:
        self._engine = engine
        self._source = source
        self._client = client

    def send(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Send tensors in the order of the specs, and return after every engine has loaded them."""
        self._client.version = version
        self._source.named_tensors = named_tensors
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the NCCL group."""
        self._engine.shutdown()


def connect(
    backend: Literal["nccl", "ipc"],
    specs: list[TensorSpec],
    *,
    client: EngineClient,
    rank: int,
    rendezvous: Rendezvous | None = None,
) -> VllmTransport:
    """Connect this trainer rank to all engines. Call it on every rank; rank 0 sends.

    `specs` must list the tensors of every push, in push order and with the transfer dtype. With ipc, trainer rank i
    must be on the same GPU as engine worker i.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    source = PushSource(specs)
    init_info = _trainer_init_info(
        backend, rank=rank, num_workers=client.num_workers, buffer_size=buffer_bytes(specs), rendezvous=rendezvous
    )
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)  # type: ignore[arg-type]
    return VllmTransport(engine, source, client)
