"""Scans by kernels that take bounds of sequences: stand-ins on a CPU, flash-linear-attention and mamba-ssm on a GPU."""

import inspect
import itertools
import sys
from typing import Any

import pytest
import torch
from test_mixers_in_packs import APART, SHARED, assert_equal, in_pack, packed_model, tiny_model

from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.mixers import operations
from rlhf_cli.models.mixers.operations import SCANS, Operation, Scan
from rlhf_cli.models.policy import PolicyModel

KINDS = {
    "kimi_linear": "Kimi delta attention",
    "olmo_hybrid": "gated delta net",
    "qwen3_5_text": "gated delta net",
    "qwen3_next": "gated delta net",
}
NUMBERED = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")


def stand_in(rule: Operation) -> Operation:
    """Return a kernel with the arguments of flash-linear-attention 0.6.0 that computes sequences one by one."""

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        initial_state: torch.Tensor | None,
        output_final_state: bool,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
        **options: torch.Tensor | bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert options.keys() == {"g", "beta", "use_qk_l2norm_in_kernel"}
        assert len(q) == 1
        assert cu_seqlens.dtype == torch.int64
        assert cu_seqlens_cpu.equal(cu_seqlens.cpu())
        outputs, states = [], []
        for number, (first, stop) in enumerate(itertools.pairwise(cu_seqlens)):
            part = slice(int(first), int(stop))
            output, state = rule(
                *(tensor[:, part] for tensor in (q, k, v)),
                initial_state=None if initial_state is None else initial_state[number : number + 1],
                output_final_state=output_final_state,
                **{name: one[:, part] if isinstance(one, torch.Tensor) else one for name, one in options.items()},
            )
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None

    return kernel


@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_flat_runs_have_the_logprobs_and_gradients_of_rows(
    kind: str, sequences: list[TokenSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, made = packed_model(kind), pack_groups(sequences)
    weights = torch.linspace(-1, 1, made.targets_K.numel())
    rows = in_pack(policy, made, weights)
    module, scan = sys.modules[type(policy.model).__module__], SCANS[KINDS[kind]]
    rule, used = inspect.unwrap(getattr(module, scan.function)), []

    def kernel_of(scan: Scan, tensor: torch.Tensor) -> Operation:
        used.append(scan.kernel)
        return stand_in(rule)

    monkeypatch.setattr(operations, "flat_kernel", kernel_of)
    assert_equal(in_pack(policy, made, weights), rows)
    assert {*used} == {scan.kernel}


def numbered_stand_in(scan: Operation) -> Operation:
    """Return a kernel with the arguments of mamba-ssm 2.3 that scans sequences one by one."""

    def kernel(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        seq_idx: torch.Tensor,
        return_final_states: bool,
        **options: Any,
    ) -> torch.Tensor:
        assert options.keys() <= {"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit", "initial_states"}
        assert options.get("initial_states") is None
        assert not return_final_states
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == x.shape[:2]
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(tensor.split(lengths, dim=1) for tensor in (x, dt, B, C)), strict=True)
        return torch.cat([scan(x, dt, A, B, C, **options) for x, dt, B, C in parts], dim=1)

    return kernel


@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", NUMBERED)
def test_numbered_runs_have_the_logprobs_and_gradients_of_rows(
    kind: str, sequences: list[TokenSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, made = packed_model(kind), pack_groups(sequences)
    weights = torch.linspace(-1, 1, made.targets_K.numel())
    rows, calls = in_pack(policy, made, weights), []
    module, scan = sys.modules[type(policy.model).__module__], SCANS["Mamba 2"]
    kernel = numbered_stand_in(inspect.unwrap(getattr(module, scan.function)))

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(args))
        return kernel(*args, **options)

    monkeypatch.setattr(operations, "flat_kernel", lambda scan, tensor: counted)
    assert_equal(in_pack(policy, made, weights), rows)
    # States at the ends of shared prompts need rows.
    assert bool(calls) == (sequences is APART)


def test_without_a_gpu_no_kernel_is_imported() -> None:
    assert all(operations.flat_kernel(scan, torch.zeros(1)) is None for scan in SCANS.values())
    assert operations._imported("no_such_package.kernel", "cu_seqlens") is None
    assert operations._imported("json.dumps", "cu_seqlens") is None


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", [*KINDS, *NUMBERED])
def test_kernels_keep_sequences_apart(kind: str, sequences: list[TokenSequence]) -> None:
    scan = SCANS[KINDS.get(kind, "Mamba 2")]
    if operations._imported(scan.kernel, scan.bounds) is None:
        pytest.skip(f"{scan.kernel} is not installed")
    model = PolicyModel(tiny_model(kind, VARLEN)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        packed = model(pack_groups(sequences).to("cuda"))[0]
        alone = torch.cat([model(pack([sequence]).to("cuda"))[0] for sequence in sequences])
    assert float((packed - alone).abs().max()) < 0.05
