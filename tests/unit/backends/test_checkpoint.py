"""Checkpoints are written completely or not at all, and load as they were saved."""

import gc
import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlhf_cli.backends.training.checkpoint import CheckpointStore, check_same_run, differences
from rlhf_cli.errors import RunError, UsageError

MEGABYTE = 1 << 20


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def write(store: CheckpointStore, step: int, payload: bytes = b"weights") -> None:
    with store.writing(step, {"identity": {"seed": 1}, "loop": {"step": step}}, needed_bytes=0) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_bytes(payload)
        (folder / "rng.pt").write_bytes(b"\0" * 100)


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Limit the size of files so that a write fails halfway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", max_num=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_what_was_written_is_read_back(store):
    assert store.latest() is None
    write(store, 3)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state["loop"]) == (3, {"step": 3})
    assert (latest.path / "actor" / "model.bin").read_bytes() == b"weights"


def test_the_newest_is_the_one_with_the_largest_step_not_the_last_name(store):
    for step in (999_999, 1_000_000):
        write(store, step)
    assert "step_1000000" < "step_999999"  # sorted by name, the older one would be last
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1_000_000


def test_older_ones_are_removed_only_after_the_new_one_is_complete(store):
    write(store, 1)
    write(store, 2)
    with store.writing(3, {}, needed_bytes=0) as folder:
        (folder / "file").write_bytes(b"new")
        assert store.steps() == [1, 2]
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(store, tmp_path, error):
    write(store, 1)
    before = contents(tmp_path)
    with pytest.raises(type(error)), store.writing(2, {}, needed_bytes=0) as folder:
        raise_after(error, (folder / "half").write_bytes(b"half-written"))
    assert contents(tmp_path) == before


def test_a_state_that_json_cannot_hold_leaves_everything_as_it_was(store, tmp_path):
    write(store, 1)
    before = contents(tmp_path)
    with pytest.raises(TypeError), store.writing(2, {"loop": object()}, needed_bytes=0):
        pass
    assert contents(tmp_path) == before


def test_what_a_kill_left_half_written_is_ignored_and_then_removed(store, tmp_path):
    write(store, 1)
    for leftover in (".writing", ".writing-0a1b2c3d", ".removing-0a1b2c3d"):
        (tmp_path / "checkpoints" / leftover / "actor").mkdir(parents=True)
        (tmp_path / "checkpoints" / leftover / "actor" / "half").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step_000007").mkdir()  # no manifest: incomplete
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    write(store, 2)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step_000001", "step_000002", "step_000007"}
    assert not (store.path(2) / "actor" / "half").exists()


def test_a_rank_that_outlived_a_killed_run_writes_into_no_later_checkpoint(store, tmp_path):
    with pytest.raises(KeyboardInterrupt), store.writing(1, {}, needed_bytes=0) as killed:
        raise KeyboardInterrupt
    with store.writing(1, {}, needed_bytes=0) as folder:
        assert folder != killed
        assert folder.parent == killed.parent
        killed.mkdir()
        (killed / "model.bin").write_bytes(b"of the killed run")
    assert not (store.path(1) / "model.bin").exists()
    write(store, 2)
    assert not killed.exists()


def test_a_step_written_again_replaces_the_first(store):
    write(store, 1, b"first")
    write(store, 1, b"second")
    latest = store.latest()
    assert latest is not None
    assert (latest.path / "actor" / "model.bin").read_bytes() == b"second"


def test_clearing_removes_checkpoints_and_nothing_else(store, tmp_path):
    write(store, 1)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step_by_step").mkdir()
    store.clear()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"notes.txt", "step_by_step"}


def raise_after(error: BaseException, done: object) -> None:
    raise error


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("actor/model.bin", truncate, "actor/model.bin has 6 bytes instead of 7"),
        ("actor/model.bin", change_last_byte, "actor/model.bin has changed since it was written"),
        ("actor/model.bin", Path.unlink, "actor/model.bin is missing"),
        ("state.json", truncate, "state.json has"),
        ("manifest.json", truncate, "manifest.json cannot be read"),
    ],
)
def test_damage_is_named_and_never_loaded(store, file, damage, said):
    write(store, 1)
    write(store, 2)
    damage(store.path(2) / file)
    with pytest.raises(UsageError, match=r"is damaged: .*; remove that folder to continue from an older one") as caught:
        store.latest()
    assert said in str(caught.value)
    assert str(store.path(2)) in str(caught.value)


def test_a_changed_byte_near_the_end_of_a_large_file_is_noticed(store):
    write(store, 1, bytes(12 * MEGABYTE))
    path = store.path(1) / "actor" / "model.bin"
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\1")
    with pytest.raises(UsageError, match=r"model\.bin has changed since"):
        store.latest()


def test_a_checkpoint_of_another_run_is_refused(store):
    write(store, 1)
    latest = store.latest()
    assert latest is not None
    check_same_run(latest, {"seed": 1}, {})
    with pytest.raises(UsageError, match=r"belongs to another run: its seed is 1, not 2; use another --output"):
        check_same_run(latest, {"seed": 2}, {})
    with pytest.raises(UsageError, match=r"cannot be repeated from .*: its seed is 1, not 2; restore what has changed"):
        check_same_run(latest, {"seed": 2}, {}, repeats=True)
    with pytest.raises(UsageError, match="belongs to another run: it does not record number of ranks; use"):
        check_same_run(latest, {"seed": 1, "number of ranks": 2}, {})


def test_a_run_with_other_settings_continues_with_its_own(store):
    write(store, 1)
    latest = store.latest()
    settings = latest.path.parent.parent / "config.yaml"
    settings.write_text("seed: 1\n")
    with pytest.raises(UsageError, match=rf"its seed is 1, not 2; continue with --config {settings}, or use another"):
        check_same_run(latest, {"seed": 2}, {"seed": 42})
    with pytest.raises(UsageError, match="weights of the policy; use another"):
        check_same_run(latest, {"seed": 2, "weights of the policy": 3}, {"seed": 42})


def test_a_setting_younger_than_the_checkpoint_has_its_default_there(store):
    write(store, 1)
    latest, defaults = store.latest(), {"adam_eps": 1e-8}
    assert latest is not None
    check_same_run(latest, {"seed": 1, "adam_eps": 1e-8, "weights of the teacher": None}, defaults)
    with pytest.raises(UsageError, match="belongs to another run: it does not record adam_eps; use"):
        check_same_run(latest, {"seed": 1, "adam_eps": 1e-6}, defaults)


def test_every_difference_of_two_runs_has_a_clause_and_no_long_value_is_shown():
    written = {"beta": 0.1, "tokenizer": "0" * 32, "adapter": None, "seed": 1}
    assert differences(written, written) == ""
    present = {"beta": 0.5, "tokenizer": "1" * 32, "adapter": None, "seed": 1, "loss": "ipo"}
    assert differences(written, present) == "its beta is 0.1, not 0.5; it differs in tokenizer; it does not record loss"
    many = differences(dict.fromkeys("abcdefgh", 1), dict.fromkeys("abcdefgh", 2))
    assert many.startswith("its a is 1, not 2; its b is 1, not 2; ")
    assert many.endswith("its e is 1, not 2; 3 further differences")


def test_a_checkpoint_that_this_program_did_not_write_is_refused(store):
    with store.writing(1, {"something": "else"}, needed_bytes=0):
        pass
    latest = store.latest()
    assert latest is not None
    with pytest.raises(UsageError, match="belongs to another run"):
        check_same_run(latest, {"command": "sft"}, {})


def test_no_room_is_said_before_anything_is_written(tmp_path):
    free = 10_000_000
    store = CheckpointStore(tmp_path, max_num=1, free_bytes=lambda path: free)
    write(store, 4)
    before = contents(tmp_path)
    with pytest.raises(RunError) as caught, store.writing(5, {}, needed_bytes=30_000_000):
        pytest.fail("the block must not run")
    assert str(caught.value) == (
        f"not enough disk space for a checkpoint in {tmp_path}: about 0.03 GB needed, 0.01 GB free; free some space "
        "and run the same command with --load_checkpoint (the checkpoint of step 4 is intact)"
    )
    assert contents(tmp_path) == before


def save_with_torch(path: Path) -> None:
    torch.save(torch.zeros(MEGABYTE), path)


def save_with_python(path: Path) -> None:
    path.write_bytes(bytes(4 * MEGABYTE))


@pytest.mark.parametrize("save", [save_with_torch, save_with_python])
def test_a_disk_that_fills_up_meanwhile_leaves_the_previous_checkpoint(store, tmp_path, save):
    write(store, 1)
    before = contents(tmp_path)
    said = pytest.raises(RunError, match=r"checkpoint of step 2 could not be written: .*step 1 is intact")
    with said, files_limited_to(MEGABYTE), store.writing(2, {}, needed_bytes=0) as folder:
        save(folder / "model.pt")
    assert contents(tmp_path) == before
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


def test_a_really_full_disk_leaves_the_previous_checkpoint(small_disk):
    store = CheckpointStore(small_disk, max_num=1)
    write(store, 1, bytes(MEGABYTE))
    before = contents(small_disk)
    said = r"could not be written: .*\(0\.00 MB were free in .*; the checkpoint of step 1 is intact\)"
    with pytest.raises(RunError, match=said), store.writing(2, {}, needed_bytes=0) as folder:
        save_with_torch(folder / "model.pt")
    gc.collect()  # the error references torch's writer, which references the file
    assert contents(small_disk) == before
    # Free space is checked before writing.
    with pytest.raises(RunError, match="not enough disk space for a checkpoint"):
        store.check_space(2 * MEGABYTE)
    write(store, 3, bytes(MEGABYTE // 2))
    assert store.steps() == [3]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", max_num=1)
    with pytest.raises(RunError, match=r"of step 1 could not be written: .*there is no earlier checkpoint") as caught:
        write(store, 1)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_manifest_lists_every_file(store):
    write(store, 1)
    manifest = json.loads((store.path(1) / "manifest.json").read_text())
    assert {name: size for name, (size, _) in manifest.items()} == {
        "actor/model.bin": 7,
        "rng.pt": 100,
        "state.json": (store.path(1) / "state.json").stat().st_size,
    }
