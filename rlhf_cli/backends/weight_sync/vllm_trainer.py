"""The trainer's side of nccl and ipc pushes, on top of vLLM's own trainer engines.

vLLM's engine drives the inference side through a client with four blocking methods; EngineClient is ours and calls
several engines at once, however they are reached. Leaves out shared memory (shm) and Ray.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlhf_cli.backends.weight_sync.transfer import NamedTensors
from rlhf_cli.errors import RunError
from rlhf_cli.models.checkpoint_names import persistent_buffers, shapes_in_checkpoint
from rlhf_cli.models.merging import parameters_without_adapter
from rlhf_cli.models.quantised import dense_layout

if TYPE_CHECKING:
    from rlhf_cli.backends.rollout.engine_host import EngineHost

_BUFFER_BYTES = 256 << 20

HostCall = Callable[["EngineHost", Any], Awaitable[object]]
CallEngines = Callable[[HostCall, Sequence[object]], None]
"""Calls a function of every engine's host with a value of its own, and waits for all of them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's entry for the engines before it is gathered; `shape` is the whole tensor's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_specs(hf_model: object) -> list[TensorSpec]:
    """Return the tensors of a push in their order; under ZeRO-3 the weights need not be gathered for it."""
    named = [*parameters_without_adapter(hf_model), *persistent_buffers(hf_model)]
    return [
        TensorSpec(name, dtype, shape)
        for own_name, tensor in named
        for own_shape, dtype in [dense_layout(tensor)]
        for name, shape in shapes_in_checkpoint(hf_model, own_name, own_shape, dtype).items()
    ]


class EngineClient:
    """vLLM's VLLMWeightSyncClient over several engines with the verbs of VllmEngine."""

    def __init__(self, call_engines: CallEngines, *, num_engines: int, ranks_per_engine: int = 1) -> None:
        self._call = call_engines
        self._num_engines = num_engines
        self._ranks_per_engine = ranks_per_engine
        self.version = 0

    @property
    def num_workers(self) -> int:
        """Workers of all engines together: the inference side of an nccl group."""
        return self._num_engines * self._ranks_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all engines; in an nccl group each engine's workers follow the workers of the engine before it."""
        infos = []
        for index in range(self._num_engines):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
            infos.append(info)
        self._call(lambda host, info: host.engine.init_weight_transfer(info), infos)

    def start_weight_update(self) -> None:
        """Open the update on all engines."""
        self._call(lambda host, _: host.engine.start_weight_update(), [None] * self._num_engines)

    def update_weights(self, update_info: object) -> None:
        """Let all engines receive; return when all have."""
        self._call(lambda host, info: host.engine.update_weights(info), [update_info] * self._num_engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on all engines under the version of this push."""
        self._call(lambda host, version: host.engine.finish_weight_update(version), [self.version] * self._num_engines)


class PushSource:
    """What vLLM calls a WeightSource; its tensors are given anew for every push."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self._specs = specs
        self.named_tensors: NamedTensors = ()

    def metadata(self) -> list[TensorSpec]:
        """Return the names, types and shapes in the order of the tensors; read before anything is gathered."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies: vLLM collects a buffer's worth before it packs them, and gathered weights are gone by then."""
        for name, tensor in self.named_tensors:
            yield name, tensor.clone()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting place of sender and engines' workers for nccl: an address of the sender's host and a free port."""

    address: str
    port: int


def buffer_bytes(specs: list[TensorSpec]) -> int:
    """Size of the buffers tensors are packed into: the largest tensor has to fit, an ipc push fails otherwise."""
    sizes = [spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs]
    return max(_BUFFER_BYTES, *sizes)


def trainer_init_info(
    backend: Literal["nccl", "ipc"], *, rank: int, num_workers: int, buffer_size: int, rendezvous: Rendezvous | None
) -> object:
    """Return vLLM's description of this trainer rank; rank 0 is the one that sends."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_size)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if rendezvous is None:
        raise RunError("weight push through nccl needs an address and a port where trainer and engines meet")
    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=rendezvous.address,
        master_port=rendezvous.port,
        world_size=1 + num_workers,
        packed=True,
        packed_buffer_size_bytes=buffer_size,
    )


class VllmTransport:
    """Sends pushes through one of vLLM's trainer engines; used on every trainer rank alike."""

    def __init__(self, engine: Any, source: PushSource, client: EngineClient) -> None:
        self._engine = engine
        self._source = source
        self._client = client

    def send(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Send in the order of the specs and return when every engine has loaded and closed the update."""
        self._client.version = version
        self._source.named_tensors = named_tensors
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the nccl group."""
        self._engine.shutdown()


def connect(
    backend: Literal["nccl", "ipc"],
    specs: list[TensorSpec],
    *,
    client: EngineClient,
    rank: int,
    rendezvous: Rendezvous | None = None,
) -> VllmTransport:
    """Return the transport of this trainer rank, connected to all engines; called on every rank, rank 0 sends.

    `specs` are the same tensors in the same order as in every push, in the type they are sent in. ipc needs the
    trainer's rank i on the GPU of the engines' worker i.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    source = PushSource(specs)
    init_info = trainer_init_info(
        backend, rank=rank, num_workers=client.num_workers, buffer_size=buffer_bytes(specs), rendezvous=rendezvous
    )
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)  # type: ignore[arg-type]
    return VllmTransport(engine, source, client)
