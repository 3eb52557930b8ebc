"""Delta rules by kernels that take bounds of sequences, with a stand-in on a CPU and with flash-linear-attention."""

import importlib.util
import inspect
import itertools
import sys

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
        **options: torch.Tensor | bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert options.keys() == {"g", "beta", "use_qk_l2norm_in_kernel"}
        assert len(q) == 1
        assert cu_seqlens.dtype == torch.int64
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


def test_without_a_gpu_no_kernel_is_imported() -> None:
    assert all(operations.flat_kernel(scan, torch.zeros(1)) is None for scan in SCANS.values())
    assert operations._imported("no_such_package.kernel") is None
    assert operations._imported("json.dumps") is None


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_keep_sequences_apart(kind: str, sequences: list[TokenSequence]) -> None:
    model = PolicyModel(tiny_model(kind, VARLEN)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        packed = model(pack_groups(sequences).to("cuda"))[0]
        alone = torch.cat([model(pack([sequence]).to("cuda"))[0] for sequence in sequences])
    assert all(operations._imported(scan.kernel) is not None for scan in SCANS.values() if scan.kernel)
    assert float((packed - alone).abs().max()) < 0.05
