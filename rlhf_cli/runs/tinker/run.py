"""Implementation of `rlhf serve-tinker`: binds the address, loads trainer and engine, and serves until a signal."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus
from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.rollout.backend_choice import described, rollout_backend
from rlhf_cli.backends.rollout.engine import RolloutEngine, engine_settings
from rlhf_cli.backends.rollout.engine_host import make_engine
from rlhf_cli.backends.training.adapter_trainer import AdapterTrainer
from rlhf_cli.backends.weight_sync.adapter_push import VLLM_RANKS, adapter_manifest
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.commands.serve_tinker import ServeTinkerConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.tinker import DEFAULT_MAX_LEN, TINKER_KEY_PREFIX
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import refuse_classifier
from rlhf_cli.models.finding import FoundModel, adapter_folder, find_model
from rlhf_cli.models.positions import known_positions
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.rewards.server.app import StoppableServer
from rlhf_cli.rewards.server.connections import BoundedConnection
from rlhf_cli.runs.inference.model_groups import ARCHITECTURES
from rlhf_cli.runs.server_address import address_of, listening, server_key
from rlhf_cli.runs.tinker.app import tinker_app
from rlhf_cli.runs.tinker.checkpoints import Checkpoints, SavedWeights
from rlhf_cli.runs.tinker.sampler import Sampler
from rlhf_cli.runs.tinker.service import Service
from rlhf_cli.runs.tinker.state import ServedModel

_SHARED_GPU = 0.6
"""Fraction of GPU memory for the engine, which shares the GPU with the trainer."""
_MAX_CONNECTIONS = 4096


class _Connection(BoundedConnection):
    """A client holds a connection for each result that it waits for."""

    max_per_address = 2048


def run_tinker_server(config: ServeTinkerConfig) -> None:
    """Serve until Ctrl-C or SIGTERM, then exit with status 130."""
    stop = StopSignal()
    key, is_made = server_key(config.server, prefix=TINKER_KEY_PREFIX)
    with ExitStack() as stack:
        # Bind before loading the model, so that a port in use is reported at once.
        listener = stack.enter_context(listening(config.server.host, config.server.port))
        stack.enter_context(output_lock(Path(config.adapters.output)))
        asyncio.run(_serve(config, listener, stop, key=key, is_made=is_made))
    sys.exit(INTERRUPTED)


async def _serve(
    config: ServeTinkerConfig, listener: socket.socket, stop: StopSignal, *, key: str, is_made: bool
) -> None:
    async with running_service(config) as service:
        app = tinker_app(service, key=key, max_body_mb=config.server.max_body_mb)
        server = StoppableServer(app, stop, _Connection, max_connections=_MAX_CONNECTIONS)
        _announce(config, listener, service.served, key if is_made else None)
        # Pass the bound socket, so that no other process can take the port meanwhile.
        await server.serve(sockets=[listener])


@asynccontextmanager
async def running_service(config: ServeTinkerConfig) -> AsyncIterator[Service]:
    """Load trainer and engine, and stop them at the end of the block."""
    if adapter_folder(config.model.pretrain) is not None:
        raise UsageError(
            f"--pretrain {config.model.pretrain!r} is an adapter: merge it into its base with `rlhf merge`"
        )
    found = find_model(config.model)
    refuse_classifier(found.architecture, f"--pretrain {config.model.pretrain!r}")
    backend = rollout_backend(config.engine, found.architecture)
    check_push(config, found, backend)
    served = _served_model(config, found)
    thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    sender = WeightSender(ShmTransport())
    async with AsyncExitStack() as stack:
        # Before the trainer: the engine measures how much GPU memory is free.
        engine = _engine(config, found, backend, served)
        stack.push_async_callback(engine.shutdown)
        stack.callback(sender.close)
        stack.callback(thread.shutdown, cancel_futures=True)
        trainer = _trainer(config)
        checkpoints = Checkpoints(Path(config.adapters.output), fingerprint=trainer.fingerprint)
        checkpoints.remove_snapshots()
        stack.callback(checkpoints.remove_snapshots)

        async def push(engine: RolloutEngine, saved: SavedWeights | None, version: int) -> None:
            def send() -> dict[str, object]:
                weights = service.loaded(saved)
                if served.max_rank is not None:
                    return adapter_manifest(weights.factors.items(), trainer.vllm_config(weights), version=version)
                manifest = sender.send(trainer.engine_weights(weights), version).manifest
                assert manifest is not None, "this transport always returns one"
                return manifest

            manifest = await asyncio.get_running_loop().run_in_executor(thread, send)
            await engine.start_weight_update()
            await engine.update_weights(manifest)
            await engine.finish_weight_update(version)
            sender.close()

        sampler = Sampler(engine, push)
        service = Service(trainer, sampler, checkpoints, thread=thread, served=served)
        serving = asyncio.create_task(sampler.run())
        stack.push_async_callback(_canceled, serving)
        yield service


async def _canceled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _trainer(config: ServeTinkerConfig) -> AdapterTrainer:
    checkpointing = config.adapters.gradient_checkpointing or None
    model = ModelConfig(**config.model.model_dump(), gradient_checkpointing=checkpointing)
    return AdapterTrainer(model, max_tokens=config.adapters.max_tokens_per_gpu)


def _served_model(config: ServeTinkerConfig, found: FoundModel) -> ServedModel:
    adapters = config.adapters
    positions = known_positions(found.architecture)
    longest = adapters.max_len or DEFAULT_MAX_LEN
    if positions is not None and longest > positions[0]:
        if adapters.max_len is not None:
            raise UsageError(f"--max_len {longest} exceeds the {positions[0]} positions of the model ({positions[1]})")
        longest = positions[0]
    return ServedModel(
        name=adapters.model_name or config.model.pretrain,
        tokenizer_id=found.path,
        tokenizer=load_tokenizer(config.model),
        vocab_size=found.architecture.get_text_config().vocab_size,
        max_len=longest,
        max_models=adapters.max_models,
        max_rank=adapters.max_lora_rank if adapters.lora_push == "adapter" else None,
        max_snapshots=adapters.max_snapshots,
        lora_alpha=adapters.lora_alpha,
        seed=adapters.seed,
    )


def check_push(config: ServeTinkerConfig, found: FoundModel, backend: str) -> None:
    """Raise UsageError if the engine cannot apply adapters to the model."""
    if config.adapters.lora_push == "merged":
        return
    kind = (found.architecture.architectures or [found.architecture.model_type])[0]
    if backend != "vllm":
        raise UsageError(f"--lora_push adapter requires vLLM; --rollout_backend {backend} supports only merged")
    if kind not in ARCHITECTURES:
        raise UsageError(f"--lora_push adapter does not support {kind}; use --lora_push merged")
    if may_have_gpus() and config.model.param_dtype == "fp32":
        raise UsageError("--lora_push adapter: on a GPU vLLM requires 16-bit weights; set --param_dtype bf16")


def _engine(config: ServeTinkerConfig, found: FoundModel, backend: str, served: ServedModel) -> RolloutEngine:
    print(f"Engine: {described(config.engine, backend)}", flush=True)
    settings = engine_settings(
        config.engine,
        config.model,
        PicturesConfig(),
        max_model_len=served.max_len,
        seed=config.adapters.seed,
        max_lora_rank=served.max_rank and next(rank for rank in VLLM_RANKS if rank >= served.max_rank),
        gpu_memory_utilization=config.engine.vllm_gpu_memory_utilization or _SHARED_GPU,
    )
    return make_engine(backend, found.path, settings)


def _announce(config: ServeTinkerConfig, listener: socket.socket, served: ServedModel, made_key: str | None) -> None:
    print(f"Serving the Tinker API for base_model {served.name!r}, sequences of up to {served.max_len} tokens:")
    print(f"export TINKER_BASE_URL={address_of(listener)}")
    print(f"export TINKER_API_KEY={made_key or '$' + config.server.api_key_env}")
    # Clients may wait for these lines in a pipe.
    sys.stdout.flush()
