"""Seconds of each phase of a step, from operations and bytes, and the part of the hardware that limits it.

Efficiencies are calibrated on one measurement (docs/benchmarks.md): Qwen2.5-1.5B in packs of 16,384 tokens on one
H200 trains at 36,679 tokens/s with ZeRO-2, 30,906 with gradient checkpointing and 27,097 with ZeRO-3. All other times
are forecasts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.memory import RoleMemory, added
from rlhf_cli.planning.phases import Batching
from rlhf_cli.planning.workload import Tokens, Workload

_PRODUCTS = 0.75
"""Fraction of peak speed that large matrix products reach."""
_MEMORY = 0.8
"""Fraction of peak memory bandwidth that elementwise kernels reach."""
_LINKS = 0.7
"""Fraction of peak bandwidth that collectives and copies to host memory reach."""
_TRAFFIC = 2.1
"""Bytes that a forward pass reads and writes per byte of kept activations. A backward pass moves twice as many."""
_LOGIT_TRAFFIC = 64
"""Bytes per logit in training: the product, float32 softmax, and the same again with gradients in the backward pass."""
_LAYER_SECONDS = 0.0036
"""Time per layer and micro-batch that operations and bytes do not explain, fitted to one run on an H200.

A layer launches 124 kernels in training with eager PyTorch (docs/benchmarks.md). At about 4 microseconds each, these
are 0.5 ms, so launches are not the only cause.
"""
_ZERO3_LAYER_SECONDS = 0.0056
"""Additional time per layer and micro-batch of ZeRO-3's hooks."""
_GRADIENT_TRAFFIC = 20
"""Bytes per parameter and micro-batch for adding gradients to their sums."""
_OPTIMIZER_TRAFFIC = 30
"""Bytes per parameter of an AdamW step: float32 weights, moments and gradients, and weights in 16 bits."""
_CPU_LAYER_SECONDS = 0.0004
_DECODE_SECONDS, _EAGER_SECONDS = 0.003, 0.02
"""Time per decoding step outside kernels, with CUDA graphs and without."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, and its largest part: compute, memory bandwidth, launches, communication or host link."""

    seconds: float
    limit: str


Costs = dict[str, float]
"""Seconds by limiting part."""


def _phase(costs: Costs) -> PhaseTime:
    return PhaseTime(sum(costs.values()), max(costs, key=lambda name: costs[name]))


def phase_times(work: Workload, batching: Batching) -> dict[str, PhaseTime]:
    """Return the times of all phases of a step."""
    found: dict[str, PhaseTime] = {}
    if work.engine is not None:
        if work.serves:
            # Between a message and its first token, and from there to the end of the answer.
            found |= {"prefill": _phase(_prefill(work, ENGINE)), "decode": _phase(_decoding(work, ENGINE))}
        else:
            found["generate"] = _phase(added(_prefill(work, ENGINE), _decoding(work, ENGINE)))
    if work.judge is not None:
        judged = _phase(added(_prefill(work, JUDGE), _decoding(work, JUDGE)))
        # On GPUs of its own, a judge reads responses while others are sampled.
        overlap = 0.0 if work.hardware.is_cpu or work.judge_sleeps else found["generate"].seconds
        if judged.seconds > overlap:
            found["reward"] = replace(judged, seconds=judged.seconds - overlap)
    # The loop calls one model at a time, also where each has its own GPUs.
    if work.tokens.forward:
        found["forward"] = _phase(added(*_forwards(work, batching)))
    if work.trained:
        found["train"] = _phase(added(*(_training(work, batching, name) for name in work.trained)))
    transfer = _transfer(work)
    if any(transfer.values()):
        found["transfer"] = _phase(transfer)
    return found


def step_seconds(work: Workload, times: Mapping[str, PhaseTime]) -> float:
    """Return the seconds of a step: all phases, or the longer of sampling and training where they run at once."""
    sampling = sum(times[name].seconds for name in ("generate", "reward") if name in times)
    transfer = times["transfer"].seconds if "transfer" in times else 0.0
    training = sum(time.seconds for time in times.values()) - sampling - transfer
    return transfer + (max(sampling, training) if work.samples_ahead else sampling + training)


def _forwards(work: Workload, batching: Batching) -> Iterator[Costs]:
    for name, tokens in work.tokens.forward.items():
        yield _pass(work, batching, work.roles[name], tokens, num_passes=1, trains=False)


def _training(work: Workload, batching: Batching, name: str) -> Costs:
    """Return the costs of all forward and backward passes and optimizer steps of a role."""
    role, hardware, updates = work.roles[name], work.hardware, work.tokens.updates
    # A backward pass costs two forward passes, of which frozen weights need only one.
    is_full = role.num_trained >= role.shape.parameters
    num_passes = (3.0 if is_full else 2.0) + (1.0 if batching.recomputes else 0.0)
    costs = _pass(work, batching, role, work.tokens.trained, num_passes=num_passes, trains=True)
    packs = _packs(work, batching, role, work.tokens.trained, at_least=updates)
    busy = costs["compute"] + costs["memory bandwidth"] + costs["launches"]
    costs["communication"] += _reductions(work, role, packs, compute=busy)
    if role.offloads_activations:
        costs["host link"] += _offloading(work, role)
    shards = role.num_ranks if role.settings.zero_stage else 1
    step = role.num_trained * _OPTIMIZER_TRAFFIC / shards / _elementwise(hardware)
    costs["memory bandwidth"] += packs * role.num_trained * _GRADIENT_TRAFFIC / _elementwise(hardware)
    if role.settings.adam_offload:
        # Gradients and weights travel; the CPU reads and writes states at the speed of its memory.
        moved = 6 * role.num_trained / shards / (_LINKS * hardware.host_link)
        costs["host link"] += updates * (moved + role.num_trained * _OPTIMIZER_TRAFFIC / shards / _HOST_BANDWIDTH)
    else:
        costs["memory bandwidth"] += updates * step
    return costs


_HOST_BANDWIDTH = 20e9
"""Bytes per second at which one rank's CPU Adam moves states."""


def _elementwise(hardware: Hardware) -> float:
    return _MEMORY * hardware.bandwidth


def _packs(work: Workload, batching: Batching, role: RoleMemory, tokens: float, *, at_least: float) -> float:
    """Return the micro-batches of a rank that hold these tokens of all ranks."""
    groups = role.num_ranks / role.settings.ranks_per_pack
    size = (batching.max_tokens or work.longest) * role.settings.sequence_parallel_size
    return max(at_least, tokens / groups / size)


def _pass(
    work: Workload, batching: Batching, role: RoleMemory, tokens: float, *, num_passes: float, trains: bool
) -> Costs:
    """Return the costs of passes over tokens; `num_passes` counts forward passes of equal cost."""
    hardware, shape = work.hardware, role.shape
    own = tokens / role.num_ranks
    packs = _packs(work, batching, role, tokens, at_least=work.tokens.updates if trains else 1.0)
    layer_seconds = _CPU_LAYER_SECONDS if hardware.is_cpu else _LAYER_SECONDS
    traffic = own * shape.kept_values * role.value_bytes * _TRAFFIC * num_passes
    logits = own * shape.vocabulary * _LOGIT_TRAFFIC * (1.0 if trains else 1 / 3)
    launches = packs * shape.layers * layer_seconds * (1.0 if trains else 1 / 3)
    if role.settings.zero_stage == 3 and not hardware.is_cpu:
        launches += packs * shape.layers * _ZERO3_LAYER_SECONDS * (1.0 if trains else 1 / 3)
    compute = num_passes * shape.forward_flops(own, work.tokens.length) / (_PRODUCTS * hardware.flops)
    # Forward and backward pass read all weights once each; a recomputed layer reads them for its backward pass too.
    weights = packs * (2 if trains else 1) * shape.parameters * role.weight_bytes
    is_sharded = role.settings.zero_stage == 3 and role.num_ranks > 1
    gathered = weights / _collective(work, role) if is_sharded else 0.0
    fetched = weights / (role.num_ranks if is_sharded else 1) / (_LINKS * hardware.host_link)
    return {
        "compute": compute,
        "memory bandwidth": (traffic + (logits if shape.vocabulary > 1 else 0)) / _elementwise(hardware),
        "launches": launches,
        # Both run ahead of the computation.
        "communication": max(0.0, gathered - compute),
        "host link": max(0.0, fetched - compute) if role.settings.param_offload else 0.0,
    }


def _collective(work: Workload, role: RoleMemory) -> float:
    """Return the bytes per second of a ring over a role's ranks: its slowest link, the network on several nodes."""
    nodes = (work.layout.islands[seat.island].node for name in work.roles for seat in work.layout.of(name))
    first = next(nodes)
    link = work.hardware.network if any(node != first for node in nodes) else work.hardware.link
    return _LINKS * link * role.num_ranks / max(1, role.num_ranks - 1)


def _reductions(work: Workload, role: RoleMemory, packs: float, *, compute: float) -> float:
    """Return the exposed time of gradient reductions, and of gathering updated weights at ZeRO 1 and 2.

    Gradients are reduced in float32: in each micro-batch at ZeRO 2 and 3, in each update otherwise.
    """
    if role.num_ranks == 1:
        return 0.0
    stage, updates, rate = role.settings.zero_stage, work.tokens.updates, _collective(work, role)
    seconds = (packs if stage >= 2 else updates) * role.num_trained * 4 / rate
    if stage < 3:
        seconds *= 2  # Also at ZeRO 2, DeepSpeed reduces its buckets with all-reduce.
    gathering = updates * role.num_trained * role.value_bytes / rate if stage in (1, 2) else 0.0
    # At ZeRO 2 and 3, reductions overlap with the backward pass, two thirds of the computation.
    overlaps = stage >= 2 and role.settings.overlap_comm is not False and not role.settings.adam_offload
    return gathering + (max(0.1 * seconds, seconds - 2 / 3 * compute) if overlaps else seconds)


def _offloading(work: Workload, role: RoleMemory) -> float:
    """Return the time of copies of layer inputs to host memory and back, for which the GPU waits."""
    values = work.tokens.trained / role.num_ranks * (role.shape.recomputed_values - role.shape.layer_values)
    return 2 * values * role.value_bytes / (_LINKS * work.hardware.host_link)


def _sampled(work: Workload, role: str) -> tuple[EngineMemory, Tokens, int]:
    """Return the engines of a role, rollout or judge, with the tokens of a step and their number."""
    engine, tokens = (work.judge, work.questions) if role == JUDGE else (work.engine, work.tokens)
    assert engine is not None
    return engine, tokens, max(1, len(work.layout.of(role)))


def _prefill(work: Workload, role: str) -> Costs:
    """Return the costs of computing the prompts of a step on all engines of a role."""
    engine, tokens, count = _sampled(work, role)
    operations = engine.shape.forward_flops(tokens.prefilled / count, tokens.prompt)
    if engine.shape.vision is not None and work.images.count:
        patches = tokens.prefilled / tokens.prompt * work.images.count * work.images.patches
        operations += engine.shape.vision.forward_flops(patches / count, work.images.patches)
    return {"compute": operations / (_PRODUCTS * work.hardware.flops * engine.size)}


def _decoding(work: Workload, role: str) -> Costs:
    """Return the costs of sampling all responses of a step on all engines of a role."""
    engine, tokens, count = _sampled(work, role)
    hardware = work.hardware
    requests = max(1.0, tokens.requests / count)
    length = tokens.prompt + tokens.response / 2
    running = max(1.0, min(requests, engine.running(tokens.prompt + tokens.response)))
    # Responses end at different times, so that on average fewer run than the limit.
    steps = max(requests * tokens.response / running, tokens.response) + (requests > 1) * tokens.response
    bandwidth, flops = _elementwise(hardware), _PRODUCTS * hardware.flops * engine.size
    read = engine.shape.active * engine.value_bytes / engine.size + requests * tokens.response / steps * length * (
        engine.token_bytes
    )
    per_step = _EAGER_SECONDS if engine.is_eager or not engine.is_vllm else _DECODE_SECONDS
    if engine.size > 1:
        # Two all-reduces per layer, bound by latency.
        per_step += 2 * engine.shape.layers * 15e-6
    decode = engine.shape.forward_flops(requests * tokens.response, length)
    return {
        "compute": decode / flops,
        "memory bandwidth": steps * read / bandwidth,
        "launches": steps * per_step,
    }


def _transfer(work: Workload) -> Costs:
    """Return the costs of pushing weights, and of moving states between GPUs and hosts."""
    costs = {"communication": 0.0, "host link": 0.0}
    if work.engine is None or "actor" not in work.roles:
        return costs
    actor = work.roles["actor"]
    size = actor.shape.parameters * actor.value_bytes
    is_shared = any(seat.shared for seat in work.layout.of(ENGINE))
    link = _elementwise(work.hardware) / 2 if is_shared else _collective(work, actor)
    costs["communication"] = size / link
    if work.models_sleep:
        moved = sum(role.sleeping_bytes / role.num_ranks for role in work.roles.values())
        costs["host link"] = 2 * moved / (_LINKS * work.hardware.host_link)
    if work.engines_sleep:
        costs["host link"] += 0.5  # CUDA graphs and allocations of the engine
    return costs
