"""Runs whose memory is limited: the message names a flag, and the run succeeds with it under the same limit."""

import json
import re
import resource
from pathlib import Path

import pytest
from forked import started_rlhf

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MIB = 2**20


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "response": f"{n}" * 300}) + "\n" for n in range(10, 18)))
    return path


def private_bytes(pid: int) -> int:
    """Return the size of a process's private writable memory, which `ulimit -d` limits."""
    (kib,) = re.findall(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024


def limited(*words: object, more: int, status: int) -> str:
    """Run a command that may use `more` bytes in addition to its libraries, and return its outputs."""
    with started_rlhf(*words) as command:
        limit = private_bytes(command.pid) + more
        resource.prlimit(command.pid, resource.RLIMIT_DATA, (limit, limit))
        return command.finish(status=status)


def test_full_host_memory_names_a_flag_with_which_the_run_fits(model, rows, tmp_path):
    words = ["sft", "--pretrain", model, "--dataset", rows, "--max_steps", 1, "--train_batch_size", 8]
    # DeepSpeed's two buckets for gradients need 160 MB each at ZeRO-1 to 3.
    printed = limited(*words, "--output", tmp_path / "full", more=350 * MIB, status=1)
    assert "out of host memory while " in printed
    (flags,) = re.findall(r": set (--[^(]+) \([\d.]+ instead of [\d.]+ GiB planned\)", printed)
    limited(*words, "--output", tmp_path / "fits", *flags.split(), more=350 * MIB, status=0)
