"""Weight updates through files: tensors are read back unchanged, and errors name the cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_cli.backends.weight_sync.shm import ShmTransport, read_push, read_verified_push
from rlhf_cli.backends.weight_sync.transfer import Idle, WeightSender, weights_checksum
from rlhf_cli.errors import OutOfMemory, RunError


def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(33, 7),
        "norm.weight": torch.randn(7).to(torch.bfloat16),
        "scale": torch.tensor(3.0),
        "steps": torch.arange(5),
        "transposed": torch.randn(4, 6).T,
    }


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


@pytest.fixture
def sender(tmp_path: Path):
    sender = WeightSender(ShmTransport(bucket_bytes=512, folders=(str(tmp_path),)))
    yield sender
    sender.close()


def test_what_is_read_is_what_was_sent(sender):
    weights = some_weights()
    report = sender.send(weights.items(), version=3)
    received, checksum = read_verified_push(report.manifest, shapes(weights))
    assert [name for name, _ in received] == list(weights)
    for name, tensor in received:
        torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0)
    assert checksum == report.checksum == weights_checksum(weights.items())
    assert (report.version, report.num_tensors) == (3, 5)
    assert report.num_bytes == 33 * 7 * 4 + 7 * 2 + 4 + 5 * 8 + 24 * 4


def test_several_engines_read_the_same_push_and_may_change_what_they_read(sender):
    weights = some_weights()
    report = sender.send(weights.items(), version=1)
    first, _ = read_verified_push(report.manifest, shapes(weights))
    for _, tensor in first:
        tensor.zero_()
    second, checksum = read_verified_push(report.manifest, shapes(weights))
    assert checksum == report.checksum
    torch.testing.assert_close(dict(second)["embed.weight"], weights["embed.weight"])


def test_buckets_are_bounded_but_for_a_tensor_larger_than_one(sender):
    weights = {f"w{index}": torch.zeros(100) for index in range(3)} | {"large": torch.zeros(1000)}
    manifest = sender.send(weights.items(), version=1).manifest
    assert [[entry["name"] for entry in bucket["tensors"]] for bucket in manifest["buckets"]] == [
        ["w0"],
        ["w1"],
        ["w2"],
        ["large"],
    ]
    assert all(os.path.getsize(bucket["path"]) == bucket["size"] for bucket in manifest["buckets"])


def test_weights_are_sent_in_the_engines_type(tmp_path):
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)), dtype=torch.bfloat16)
    weights = {"w": torch.randn(10), "steps": torch.arange(3)}
    manifest = sender.send(weights.items(), version=1).manifest
    assert manifest is not None
    received = dict(read_push(manifest))
    torch.testing.assert_close(received["w"], weights["w"].to(torch.bfloat16), atol=0, rtol=0)
    assert received["steps"].dtype == torch.int64


def test_the_files_of_a_push_are_gone_after_the_next_one_and_after_close(sender, tmp_path):
    first = sender.send(some_weights().items(), version=1).manifest
    held = read_push(first)
    second = sender.send(some_weights().items(), version=2).manifest
    buckets = {str(path) for path in tmp_path.glob("*/v*")}
    assert buckets == {bucket["path"] for bucket in second["buckets"]}
    assert len(list(tmp_path.iterdir())) == 1
    assert {os.stat(path).st_mode & 0o777 for path in buckets} == {0o600}
    assert next(tmp_path.iterdir()).stat().st_mode & 0o777 == 0o700
    torch.testing.assert_close(dict(held)["embed.weight"], some_weights()["embed.weight"])  # still mapped and readable
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_changed_byte_fails_the_checksum(sender):
    weights = some_weights()
    manifest = sender.send(weights.items(), version=7).manifest
    with open(manifest["buckets"][0]["path"], "r+b") as file:
        file.seek(10)
        byte = file.read(1)[0]
        file.seek(10)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(RunError, match="weight push 7: checksum"):
        read_verified_push(manifest, shapes(weights))


def test_a_push_that_lost_a_tensor_says_how_many_arrived(sender):
    manifest = sender.send(some_weights().items(), version=1).manifest
    manifest["buckets"][-1]["tensors"].pop()
    with pytest.raises(RunError, match="4 tensors arrived, 5 were sent"):
        read_verified_push(manifest, {})


def test_a_cut_file_is_named(sender):
    manifest = sender.send(some_weights().items(), version=1).manifest
    path = manifest["buckets"][0]["path"]
    os.truncate(path, 16)
    with pytest.raises(RunError, match=f"{path} has 16 bytes"):
        read_push(manifest)


def test_files_on_another_machine_are_explained(sender):
    manifest = sender.send(some_weights().items(), version=1).manifest
    sender.close()
    with pytest.raises(RunError, match="--vllm_sync_backend nccl across machines"):
        read_push(manifest)


def test_a_missing_folder_is_passed_over_and_none_with_room_is_an_error(tmp_path):
    passed = ShmTransport(folders=("/nowhere", str(tmp_path)))
    assert passed.send([("w", torch.zeros(3))], version=1)["buckets"][0]["path"].startswith(str(tmp_path))
    passed.close()
    full = ShmTransport(bucket_bytes=1 << 60, folders=(str(tmp_path),))
    with pytest.raises(OutOfMemory, match=f"weight push: out of space in /dev/shm for .* MiB in {tmp_path}") as caught:
        full.send([("w", torch.zeros(3))], version=1)
    assert caught.value.shortage is not None


def test_a_folder_that_fills_up_during_a_push_is_an_error_with_the_shared_memory(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlhf_cli.backends.weight_sync.shm._Bucket.add", full)
    with pytest.raises(OutOfMemory, match="out of space in /dev/shm while a bucket was written"):
        ShmTransport(folders=(str(tmp_path),)).send([("w", torch.zeros(3))], version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_push_that_fails_in_the_middle_leaves_no_files(tmp_path):
    def weights():
        yield "w", torch.zeros(1000)
        yield "v", torch.zeros(1000)
        raise RunError("a rank died")

    sender = WeightSender(ShmTransport(bucket_bytes=512, folders=(str(tmp_path),)))
    with pytest.raises(RunError, match="a rank died"):
        sender.send(weights(), version=1)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_trainer_are_removed_by_the_next_one(tmp_path):
    code = (
        "import os, sys, torch; from rlhf_cli.backends.weight_sync.shm import ShmTransport\n"
        "ShmTransport(folders=(sys.argv[1],)).send([('w', torch.zeros(9))], version=1); os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, env=dict(os.environ, PYTHONPATH=os.getcwd())
    )
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "rlhf-weights-new").mkdir()  # its owner has not locked it yet
    ShmTransport(folders=(str(tmp_path),))
    assert [path.name for path in tmp_path.iterdir()] == ["rlhf-weights-new"]


def test_a_push_of_a_living_trainer_stays_whatever_its_process_id_means_here(tmp_path, sender):
    manifest = sender.send(some_weights().items(), version=1).manifest
    ShmTransport(folders=(str(tmp_path),))
    assert len(read_push(manifest)) == 5


def test_ranks_that_do_not_send_still_gather_every_tensor():
    gathered = []

    def weights():
        for name, tensor in some_weights().items():
            gathered.append(name)
            yield name, tensor

    report = WeightSender(Idle()).send(weights(), version=1)
    assert gathered == list(some_weights())
    assert report.manifest is None
