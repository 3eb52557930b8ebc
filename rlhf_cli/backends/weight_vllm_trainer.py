"""The trainer's side of nccl and ipc pushes, on top of vLLM's own trainer engines.

vLLM's engine drives the inference side through a client with four blocking methods; EngineClient is ours and calls
several engines at once, however they are reached. Leaves out shared memory (weight_transfer_shm) and Ray.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlhf_cli.backends.weight_transfer import NamedTensors
from rlhf_cli.errors import RunError

CallEngines = Callable[[str, list[tuple[Any, ...]]], None]
"""call(method, arguments of each engine): calls the method of all engines at once and waits for all of them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the engines are told of a tensor before it is gathered; `shape` is that of the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


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
        """Connects all engines; in an nccl group each engine's workers follow those of the engine before it."""
        infos = []
        for index in range(self._num_engines):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
            infos.append((info,))
        self._call("init_weight_transfer", infos)

    def start_weight_update(self) -> None:
        """Opens the update on all engines."""
        self._call("start_weight_update", [()] * self._num_engines)

    def update_weights(self, update_info: Any) -> None:
        """Lets all engines receive; returns when all have."""
        self._call("update_weights", [(update_info,)] * self._num_engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the update on all engines under the version of this push."""
        self._call("finish_weight_update", [(self.version,)] * self._num_engines)


def make_source(specs: list[TensorSpec]) -> Any:
    """A WeightSource of vLLM whose tensors are given anew for every push, in `.named_tensors`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class PushSource(WeightSource):
        named_tensors: NamedTensors = ()

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(spec.name, spec.dtype, spec.shape) for spec in specs]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(self.named_tensors)

    return PushSource()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the sender and the engines' workers meet for nccl: an address of the sender's host and a free port."""

    address: str
    port: int


def trainer_init_info(
    backend: Literal["nccl", "ipc"], *, rank: int, num_workers: int, rendezvous: Rendezvous | None
) -> Any:
    """vLLM's description of this trainer rank; rank 0 is the one that sends."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if rendezvous is None:
        raise RunError("weight push through nccl needs an address and a port where trainer and engines meet")
    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=rendezvous.address,
        master_port=rendezvous.port,
        world_size=1 + num_workers,
        packed=True,
    )


class VllmTransport:
    """Sends pushes through vLLM's nccl or ipc trainer engine; built and used on every trainer rank alike."""

    def __init__(
        self,
        backend: Literal["nccl", "ipc"],
        specs: list[TensorSpec],
        *,
        client: EngineClient,
        rank: int,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._client = client
        self._source = make_source(specs)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(backend, rank=rank, num_workers=client.num_workers, rendezvous=rendezvous),
            client=client,
            source=self._source,
        )

    def send(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Sends in the order of the specs and returns when every engine has loaded and closed the update."""
        self._client.version = version
        self._source.named_tensors = named_tensors
        self._engine.send_weights()

    def close(self) -> None:
        """Leaves the nccl group."""
        self._engine.shutdown()
