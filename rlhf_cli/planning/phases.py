"""Peak memory on each kind of GPU in each phase of a step, and memory of hosts and disks."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE
from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.planning.memory import GIB, TOKEN_STEP, USABLE, Fit, Parts, RoleMemory, added, fit_to_memory, total
from rlhf_cli.planning.workload import Workload

_HOST_PROCESS = 2.0 * 2**30
"""Host memory of a process with torch and CUDA; an assumption, not measured."""
_CPU_LIBRARIES, _CPU_RANK = 0.30 * GIB, 0.22 * GIB
_CPU_RAY, _CPU_RAY_RANK, _CPU_ENGINE, _CPU_VLLM = 0.69 * GIB, 0.29 * GIB, 0.36 * GIB, 1.0 * GIB
"""Memory on a CPU without models: libraries that processes share, an offline rank; the driver with Ray, an online rank,
and a transformers or vLLM engine; proportional set sizes of runs with 0.4M parameters (docs/benchmarks.md)."""
_CPU_SERVER = 0.5 * GIB
"""Memory on a CPU of `chat` and `serve-rm` without models: resident set sizes with 0.3M parameters
(docs/benchmarks.md)."""

_CHOSEN = 0.85
"""Fraction of host memory that chosen micro-batches fill: a forecast may be 15 % too low, and the kernel kills a
process that allocates more than there is."""


@dataclass(frozen=True)
class Batching:
    """Gradient checkpointing and tokens per micro-batch of a rank, with the reason if they were chosen."""

    recomputes: bool
    max_tokens: int
    reason: str = ""


@dataclass(frozen=True)
class GpuMemory:
    """Equal GPUs: their roles, their number, and the peak of each phase by part."""

    roles: tuple[str, ...]
    count: int
    phases: dict[str, Parts]

    @property
    def peak(self) -> float:
        """Bytes in the fullest phase."""
        return max((total(parts) for parts in self.phases.values()), default=0.0)


def batching_of(work: Workload) -> Batching:
    """Return the micro-batches of a run: as set, otherwise fitted to the memory of the fullest GPU."""
    config = work.config
    if not work.trained:
        return Batching(False, 0)
    given, recomputes = config.setting("train_max_tokens_per_gpu"), config.setting("gradient_checkpointing")
    if work.hardware.is_cpu:
        return _fit_to_host(work, given, recomputes)
    fits = [_fit_of(work, name) for name in work.trained]
    # All roles have the same settings, so the fullest GPU decides.
    fit = min(fits, key=lambda one: (not one.recomputes, one.max_tokens))
    chosen = recomputes is None or given is None
    return Batching(fit.recomputes, fit.max_tokens, fit.reason if chosen else "")


def _fit_to_host(work: Workload, given: int | None, recomputes: bool | None) -> Batching:
    """Return the largest micro-batches for which all processes fit in host memory together.

    Recomputing layers is the last resort: it slows a CPU down, and small micro-batches do not.
    """
    # Rows may be longer than planned, so assume full micro-batches.
    full = replace(work, tokens=replace(work.tokens, trained=math.inf))

    def lacks(share: float, again: bool, size: int) -> bool:
        batching = Batching(again, size)
        return total(host_memory(full, gpu_memory(full, batching), batching)) > share * work.hardware.memory

    wanted = given or DEFAULT_TOKENS
    # The longest sequence cannot be split.
    least = min(wanted, TOKEN_STEP * math.ceil(work.longest / TOKEN_STEP))
    sizes = [wanted] if given else [*range(least, wanted, TOKEN_STEP), wanted]
    num_fit, again = 0, bool(recomputes)
    for again in [False, True] if recomputes is None else [recomputes]:
        # False sorts before True.
        num_fit = bisect_left(sizes, True, key=partial(lacks, _CHOSEN, again))
        if num_fit:
            break
    tokens = sizes[max(0, num_fit - 1)]
    if again == bool(recomputes) and tokens == wanted:
        return Batching(again, tokens)
    mode = f"gradient checkpointing {'on' if again else 'off'}, up to {tokens:,} tokens per micro-batch"
    limit = (_CHOSEN if num_fit else USABLE) * work.hardware.memory / GIB
    verdict = "DO NOT FIT" if lacks(USABLE, again, tokens) else "fit"
    return Batching(again, tokens, f"{mode}, which {verdict} in {limit:.1f} GiB of host memory")


def _tokens_of_pack(work: Workload, batching: Batching) -> float:
    """Return the tokens of a micro-batch: on a CPU at most those of a rank in a step, which are often fewer."""
    most = batching.max_tokens or work.longest
    if not (work.hardware.is_cpu and work.trained):
        return most
    ranks = min(work.roles[name].num_ranks for name in work.trained)
    return min(most, max(1.0, work.tokens.trained / (work.tokens.updates * ranks)))


def _fit_of(work: Workload, name: str) -> Fit:
    max_tokens = work.config.setting("train_max_tokens_per_gpu")
    # The least that awake neighbors keep: with gradient checkpointing, and micro-batches of the same size.
    assumed = Batching(True, max_tokens or DEFAULT_TOKENS)
    return fit_to_memory(
        work.roles[name],
        # A role may use this fraction of its room, so that all together use it of the GPU.
        room=work.hardware.memory - sum(neighbors(work, assumed, name).values()) / USABLE,
        needed_tokens=work.longest,
        recomputes=work.config.setting("gradient_checkpointing"),
        max_tokens=max_tokens,
    )


def neighbors(work: Workload, batching: Batching, name: str) -> dict[str, float]:
    """Return the bytes of other roles and engines on the GPU of a role's first rank, while the role computes."""
    seat = work.layout.of(name)[0]
    users = _roles_on(work, work.layout.users(seat.island, seat.gpus[0]))
    return {other: total(_beside(work, batching, name, other)) for other in users if other != name}


def _roles_on(work: Workload, users: Sequence[str]) -> list[str]:
    """Return the users of a GPU with the models that they host."""
    hosted = [name for name in work.roles if work.host(name) != name and work.host(name) in users]
    return [*users, *(name for name in hosted if name not in users)]


def gpu_memory(work: Workload, batching: Batching) -> list[GpuMemory]:
    """Return the memory of all GPUs, equal ones together."""
    found: list[GpuMemory] = []
    for users, count in work.layout.kinds_of_gpus.items():
        roles = tuple(_roles_on(work, users))
        found.append(GpuMemory(roles, count, _phases(work, batching, roles)))
    return found


def _phases(work: Workload, batching: Batching, users: tuple[str, ...]) -> dict[str, Parts]:
    """Return the peak of each phase on a GPU with these roles."""
    models, engine = [name for name in users if name not in (ENGINE, JUDGE)], ENGINE in users
    tokens = _tokens_of_pack(work, batching)
    phases: dict[str, list[Parts]] = {}
    if engine and work.engine is not None:
        others = [name for name in users if name != ENGINE]
        phases["generate"] = [added(work.engine.generating(), *(_idle(work, batching, name) for name in others))]
    if JUDGE in users and work.judge is not None:
        others = [name for name in users if name != JUDGE]
        phases["judge"] = [added(work.judge.generating(), *(_idle(work, batching, name) for name in others))]
    for name in models:
        beside = [_beside(work, batching, name, other) for other in users if other != name]
        role = work.roles[name]
        if name in work.tokens.forward:
            phases.setdefault("forward", []).append(added(role.forward(tokens), *beside))
        if role.num_trained:
            active = role.training(tokens, recomputes=batching.recomputes)
            phases.setdefault("train", []).append(added(active, *beside))
        if name == "actor" and engine and work.engine is not None:
            woken = work.engine.receiving() if work.engines_sleep else work.engine.generating()
            woken = added(_pushing(work, role), woken)
            rest = [_idle(work, batching, other) for other in users if other not in (name, ENGINE)]
            phases["transfer"] = [added(woken, *rest)]
    return {phase: max(several, key=total) for phase, several in phases.items()}


def _beside(work: Workload, batching: Batching, name: str, other: str) -> Parts:
    """Return the memory of a role or engine while the role `name` computes."""
    if other in (ENGINE, JUDGE) or work.host(other) != work.host(name):
        return _idle(work, batching, other)
    # Models of the same ranks stay on the GPU together.
    return {**work.roles[other].resident(), "processes": 0}


def _idle(work: Workload, batching: Batching, name: str) -> Parts:
    """Return the memory of a role or engine that is not active."""
    if name == ENGINE:
        assert work.engine is not None
        return work.engine.asleep() if work.engines_sleep else work.engine.generating()
    if name == JUDGE:
        assert work.judge is not None
        return work.judge.asleep() if work.judge_sleeps else work.judge.generating()
    role = work.roles[name]
    parts = role.asleep() if work.models_sleep else _kept(work, batching, role)
    # A hosted model has no process.
    return parts if work.host(name) == name else {**parts, "processes": 0}


def _kept(work: Workload, batching: Batching, role: RoleMemory) -> Parts:
    """Return the memory of a role that does not sleep: PyTorch's allocator keeps that of its largest pass."""
    tokens = _tokens_of_pack(work, batching)
    return role.training(tokens, recomputes=batching.recomputes) if role.num_trained else role.forward(tokens)


def _pushing(work: Workload, role: RoleMemory) -> Parts:
    """Return the actor's memory while it pushes weights, which are gathered one after the other."""
    buffers = role.buffers + 2 * role.shape.largest * role.value_bytes
    if not work.models_sleep:
        return {**role.resident(), "buffers": buffers}
    return {"weights": role.weights, "buffers": buffers, "processes": role.process}


def host_memory(work: Workload, gpus: Sequence[GpuMemory], batching: Batching) -> dict[str, float]:
    """Return the bytes of host memory on the fullest node, by purpose. On a CPU, all models are in host memory."""
    if work.hardware.is_cpu:
        roles = [seat.role for seat in work.layout.seats if seat.role not in (ENGINE, JUDGE)]
        # A hosted model has no process.
        ranks = sum(work.host(role) == role for role in roles)
        engines = len(work.layout.of(ENGINE))
        of_engine = _CPU_VLLM if work.engine is not None and work.engine.is_vllm else _CPU_ENGINE
        own = ranks * _CPU_RAY_RANK + engines * of_engine + _CPU_RAY if engines else ranks * _CPU_RANK
        own += len(work.layout.of(JUDGE)) * _CPU_VLLM
        processes = _CPU_SERVER if work.serves else _CPU_LIBRARIES + own
        return {"processes": processes, "models": sum(gpu.count * gpu.peak for gpu in gpus)}
    by_role = {name: work.layout.ranks_by_node(work.host(name)) for name in [*work.roles, ENGINE, JUDGE]}
    # Nodes with equal ranks have equal needs.
    kinds = dict.fromkeys(tuple(nodes[one.node] for nodes in by_role.values()) for one in work.layout.islands)
    return max((_on_node(work, batching, dict(zip(by_role, kind, strict=True))) for kind in kinds), key=total)


def _on_node(work: Workload, batching: Batching, ranks: Mapping[str, int]) -> dict[str, float]:
    """Return the host memory of a node with these ranks and engines, by purpose."""
    sleeping, offloaded, average, inputs, processes = 0.0, 0.0, 0.0, 0.0, 0
    tokens = _tokens_of_pack(work, batching)
    for name, role in work.roles.items():
        fraction = ranks[name] / role.num_ranks
        sleeping += fraction * role.sleeping_bytes if work.models_sleep else 0.0
        offloaded += fraction * role.offloaded_bytes
        # An average is in host memory in float32, in parts of the ranks.
        average += fraction * 4 * role.num_trained if name == "actor" and work.config.setting("enable_ema") else 0.0
        if role.num_trained:
            inputs += fraction * role.offloaded_inputs(tokens)
        processes += ranks[name] if work.host(name) == name else 0
    processes += ranks[ENGINE] * (1 if work.engine is None else work.engine.size)
    judge = work.judge
    processes += 0 if judge is None else ranks[JUDGE] * judge.size
    found = {
        "processes": processes * _HOST_PROCESS,
        "sleeping judge": 0.0 if judge is None or not work.judge_sleeps else ranks[JUDGE] * judge.all_weights,
        "sleeping roles (pinned)": sleeping,
        "offloaded states": offloaded,
        "weight average": average,
        "offloaded activations": inputs,
    }
    return {name: size for name, size in found.items() if size}


def sleeping_by_node(work: Workload) -> dict[int, float]:
    """Return the pinned host bytes of sleeping roles by node."""
    found: dict[int, float] = defaultdict(float)
    for name, role in work.roles.items():
        for node, ranks in work.layout.ranks_by_node(work.host(name)).items():
            found[node] += ranks / role.num_ranks * role.sleeping_bytes
    if work.judge is not None and work.judge_sleeps:
        for node, engines in work.layout.ranks_by_node(JUDGE).items():
            found[node] += engines * work.judge.all_weights
    return found


def disk_bytes(work: Workload) -> dict[str, float]:
    """Return the bytes of the trained model, and of checkpoints, one of which is written before another is removed."""
    if not work.trained:
        return {}
    role, config = work.roles[work.trained[0]], work.config
    size = sum(work.roles[name].checkpoint_bytes for name in work.trained)
    kept = config.setting("max_ckpt_num") + 1 if config.setting("save_steps") > 0 else 1
    title = f"{kept} checkpoints" if kept > 1 else "a checkpoint"
    return {"model": float(role.num_trained * role.value_bytes), title: kept * size}


def shortage(work: Workload, gpus: Sequence[GpuMemory], batching: Batching) -> str:
    """Describe what does not fit: a sequence in an engine, a phase on a GPU, or the host. Returns "" if all fits."""
    engine, limit = work.engine, USABLE * work.hardware.memory
    if engine is not None and not engine.fits:
        return f"an engine on {in_gpus(engine.size)} has no room for a sequence of {engine.max_len:,} tokens"
    judge = work.judge
    if judge is not None and not judge.fits:
        return f"a judge on {in_gpus(judge.size)} has no room for a question and answer of {judge.max_len:,} tokens"
    fullest = max(gpus, key=lambda gpu: gpu.peak)
    if fullest.peak > limit:
        return f"{' + '.join(fullest.roles)} need {fullest.peak / GIB:.1f} of {limit / GIB:.1f} GiB"
    available = work.hardware.host_memory
    # Host memory of other machines is unknown.
    if available is not None and (needed := total(host_memory(work, gpus, batching))) > USABLE * available:
        return f"a node needs {needed / GIB:.0f} of {USABLE * available / GIB:.0f} GiB of host memory"
    return ""


def in_gpus(count: int) -> str:
    """Return a number of GPUs in words."""
    return f"{count} GPU{'s' if count > 1 else ''}"
