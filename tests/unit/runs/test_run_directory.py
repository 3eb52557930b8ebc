"""Allowed contents of a run folder, and the files that a new run removes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_cli.backends.process.output_lock import new_output
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.runs.inference.output_folder import prepare_folder
from rlhf_cli.runs.run_directory import (
    begin_log,
    begin_logs,
    check_not_replaced,
    check_run_directory,
    folder_of_start,
    held_output,
    prepare_run_directory,
    run_directory,
    set_later_best_aside,
)


def settings(output: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(output=str(output), **options)


def add_checkpoint(folder: Path, step: int) -> None:
    with CheckpointStore(folder, max_num=9).writing(step, {}, needed_bytes=0) as path:
        (path / "weights").write_bytes(b"weights")


def add_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))


def add_run(output: Path) -> None:
    """Add a finished run and a file of the user."""
    prepare_run_directory(settings(output), "seed: 1\n", keep=False)
    for name in ("metrics.jsonl", "samples.jsonl", "report.html", "run.json", "notes.txt"):
        (output / name).write_text("first run\n")
    (output / "logs" / "rank0.log").write_text("first run\n")
    (output / "tensorboard").mkdir()
    add_checkpoint(output / "checkpoints", 4)
    add_model(output / "model")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_is_repeated_in_the_folder_in_which_it_was_started(tmp_path, monkeypatch):
    start, here = tmp_path / "start", tmp_path / "here"
    start.mkdir()
    (here / "run").mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(UsageError, match=r"^run: not a run directory"), folder_of_start(Path("run")):
        pass
    for folder, seen in ((start, (here / "run", start)), (here, (Path("run"), here)), ("gone", (Path("run"), here))):
        (here / "run" / "run.json").write_text(json.dumps({"command": "sft", "folder": str(folder)}))
        with folder_of_start(Path("run")) as root:
            assert (root, Path.cwd()) == seen
    assert Path.cwd() == here


def test_a_fresh_folder_gets_settings_and_a_place_for_logs(tmp_path):
    check_run_directory(settings(tmp_path / "new"))
    assert not (tmp_path / "new").exists()  # a check changes nothing
    paths = prepare_run_directory(settings(tmp_path / "new"), "seed: 1\n", keep=False)
    assert (paths.root / "config.yaml").read_text() == "seed: 1\n"
    assert names(paths.root) == {"config.yaml", "logs"}
    assert (paths.checkpoints, paths.model) == (tmp_path / "new" / "checkpoints", tmp_path / "new" / "model")


def test_a_folder_with_other_things_may_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    check_run_directory(settings(tmp_path))
    prepare_run_directory(settings(tmp_path), "", keep=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_earlier_run_is_never_replaced_unasked(tmp_path):
    add_run(tmp_path)
    with pytest.raises(UsageError, match=r"contains an earlier run \(config\.yaml\): resume it with "):
        check_run_directory(settings(tmp_path))
    check_run_directory(settings(tmp_path, overwrite=True))
    check_run_directory(settings(tmp_path, load_checkpoint=True))


def test_replacing_removes_all_of_the_run_and_nothing_else(tmp_path):
    add_run(tmp_path)
    begin_logs(run_directory(settings(tmp_path)), keep=False)
    prepare_run_directory(settings(tmp_path, overwrite=True), "seed: 2\n", keep=False)
    assert names(tmp_path) == {"config.yaml", "logs", "checkpoints", "notes.txt"}
    assert not any((tmp_path / "checkpoints").iterdir())
    assert not any((tmp_path / "logs").iterdir())


def test_a_run_does_not_replace_the_model_it_starts_from(tmp_path):
    settings = CheckpointConfig(output=str(tmp_path / "run"), overwrite=True)
    check_not_replaced(settings, str(tmp_path / "other"), "owner/name", str(tmp_path / "run_2" / "model"))
    for inside in ("run", "run/model", "run/best", "run/checkpoints/step_000001/actor"):
        (tmp_path / inside).mkdir(parents=True, exist_ok=True)
        with pytest.raises(UsageError, match=f"--overwrite would remove '.*{inside}', from which this run starts"):
            check_not_replaced(settings, str(tmp_path / inside))
    check_not_replaced(settings.model_copy(update={"overwrite": False}), str(tmp_path / "run"))


def test_continuing_keeps_everything_and_writes_the_settings(tmp_path):
    add_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    prepare_run_directory(settings(tmp_path, load_checkpoint=True), "seed: 1\nmax_epochs: 3\n", keep=True)
    before[tmp_path / "config.yaml"] = b"seed: 1\nmax_epochs: 3\n"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_load_checkpoint(tmp_path):
    prepare_run_directory(settings(tmp_path), "", keep=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_run_directory(settings(tmp_path, load_checkpoint=True))


def test_a_finished_model_without_a_checkpoint_is_not_thrown_away_by_load_checkpoint(tmp_path):
    add_model(tmp_path / "model")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UsageError, match=r"model contains a trained model, .* no checkpoint in .* --overwrite"):
        check_run_directory(settings(tmp_path, load_checkpoint=True))


def test_the_best_model_so_far_is_not_thrown_away_by_load_checkpoint(tmp_path):
    add_model(tmp_path / "best")
    best = tmp_path / "best" / "best.json"
    best.write_text('{"iteration": 0}')
    check_run_directory(settings(tmp_path, load_checkpoint=True))  # the base model of the run
    best.write_text('{"iteration": 3}')
    with pytest.raises(UsageError, match=r"best contains a trained model, .* no checkpoint in .* --overwrite"):
        check_run_directory(settings(tmp_path, load_checkpoint=True))
    add_checkpoint(tmp_path / "checkpoints", 2)
    check_run_directory(settings(tmp_path, load_checkpoint=True))


def add_best(folder: Path, iteration: int) -> None:
    add_model(folder)
    (folder / "best.json").write_text(json.dumps({"metric": "eval/reward", "iteration": iteration, "value": 0.5}))


def test_a_best_model_that_the_checkpoint_does_not_know_is_set_aside_and_never_lost(tmp_path):
    paths = run_directory(settings(tmp_path))
    assert set_later_best_aside(paths, known=None) is None  # there is no best model
    add_best(paths.best, 4)
    assert set_later_best_aside(paths, known=4) is None
    for name in ("best.after_4", "best.after_4.2", "best.after_4.3"):
        assert set_later_best_aside(paths, known=2) == tmp_path / name
        assert not paths.best.exists()
        add_best(paths.best, 4)
    assert set_later_best_aside(paths, known=None) == tmp_path / "best.after_4.4"
    assert (tmp_path / "best.after_4" / "best.json").is_file()


def test_best_models_that_were_set_aside_belong_to_the_run(tmp_path):
    add_run(tmp_path)
    paths = run_directory(settings(tmp_path))
    add_best(paths.best, 4)
    set_later_best_aside(paths, known=2)
    check_run_directory(settings(tmp_path, load_checkpoint=True))
    prepare_run_directory(settings(tmp_path, overwrite=True), "", keep=False)
    assert not list(tmp_path.glob("best*"))


def test_checkpoints_elsewhere_belong_to_the_run_too(tmp_path):
    elsewhere = tmp_path / "disk"
    add_checkpoint(elsewhere, 40)
    (elsewhere / "others.txt").write_text("mine")
    placed = {"output": tmp_path / "run", "ckpt_path": str(elsewhere)}
    with pytest.raises(UsageError, match=r"contains an earlier run \(step_000040\)"):
        check_run_directory(settings(**placed))
    # If kept, step 40 would count as newer than everything from the new run.
    prepare_run_directory(settings(**placed, overwrite=True), "", keep=False)
    assert names(elsewhere) == {"others.txt"}


def test_a_model_elsewhere_is_not_replaced_unasked(tmp_path):
    add_model(tmp_path / "published")
    placed = {"output": tmp_path / "run", "save_path": str(tmp_path / "published")}
    with pytest.raises(UsageError, match=r"contains an earlier run \(published\)"):
        check_run_directory(settings(**placed))
    prepare_run_directory(settings(**placed, overwrite=True), "", keep=False)
    assert names(tmp_path / "published") == {"config.json"}  # it is kept until the new model replaces it


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"load_checkpoint": True}])
def test_a_folder_that_holds_no_model_is_never_taken_for_one(tmp_path, options):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"cannot be saved in .*model, which contains other files"):
        check_run_directory(settings(tmp_path, **options))


@pytest.mark.parametrize("flag", ["output", "ckpt_path", "save_path"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, flag):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file is a file, not a folder"):
        check_run_directory(CheckpointConfig(**({"output": str(tmp_path / "run")} | {flag: str(tmp_path / "file")})))


def test_files_of_others_in_the_folder_of_logs_stay(tmp_path):
    (tmp_path / "logs" / "old").mkdir(parents=True)
    for name in ("slurm-17.out", "driver.log", "notes.log", "actor-0.log", "old/rank0.log"):
        (tmp_path / "logs" / name).write_text("x")
    begin_logs(run_directory(settings(tmp_path)), keep=False)
    assert names(tmp_path / "logs") == {"slurm-17.out", "notes.log", "old"}
    assert names(tmp_path / "logs" / "old") == {"rank0.log"}
    (tmp_path / "logs" / "engine-3.log").write_text("x")
    prepare_folder(tmp_path, "", {}, keep=False)
    assert names(tmp_path / "logs") == {"slurm-17.out", "notes.log", "old"}


def test_the_logs_of_every_role_are_a_runs_own(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for role in (*ROLES, "engine"):
        (logs / f"{role}-0.log").write_text("of an earlier run")
    begin_logs(run_directory(settings(tmp_path)), keep=False)
    assert not names(logs)


def test_overwrite_removes_nothing_in_a_folder_that_no_run_has_written(tmp_path):
    for name in ("best", "tensorboard"):
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=r"--overwrite: .* contains best, but no run.json, which every run has"):
        check_run_directory(settings(tmp_path, overwrite=True))
    add_checkpoint(tmp_path / "other" / "checkpoints", 3)
    with pytest.raises(UsageError, match=r"contains step_000003, but no run.json"):
        check_run_directory(settings(tmp_path / "other", overwrite=True))


def test_a_linked_model_is_replaced_and_its_target_stays(tmp_path):
    add_model(tmp_path / "target")
    add_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "target")
    (tmp_path / "run" / "best").symlink_to(tmp_path / "nowhere")
    prepare_run_directory(settings(tmp_path / "run", overwrite=True), "", keep=False)
    assert names(tmp_path / "run") == {"config.yaml", "logs", "checkpoints", "notes.txt"}
    assert names(tmp_path / "target") == {"config.json"}


@pytest.mark.parametrize("flag", ["output", "ckpt_path", "save_path"])
def test_an_empty_name_is_refused_instead_of_meaning_the_current_folder(flag):
    with pytest.raises(ValidationError, match="the name of a folder or file is empty"):
        CheckpointConfig(**({"output": "runs/x"} | {flag: ""}))


HOLD = """
import sys, time
from pathlib import Path
from rlhf_cli.backends.process.output_lock import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_with_the_same_output_is_refused_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=rf"is in use by another run \(process {first.pid} on "),
            held_output(settings(tmp_path)),
        ):
            pass
        first.kill()  # the kernel releases the lock
        first.wait()
        with held_output(settings(tmp_path)):
            pass


def test_two_runs_with_the_same_folder_of_checkpoints_are_refused(tmp_path):
    shared = str(tmp_path / "disk")
    with held_output(settings(tmp_path / "a", ckpt_path=shared)):
        with (
            pytest.raises(UsageError, match=r"^--ckpt_path .*disk is in use by another run"),
            held_output(settings(tmp_path / "b", ckpt_path=shared)),
        ):
            pass
        assert names(tmp_path) == {"a", "disk"}
        with held_output(settings(tmp_path / "c", ckpt_path=str(tmp_path / "c" / "inside"))):
            assert names(tmp_path / "c") == {".lock"}
    with held_output(settings(tmp_path / "b", ckpt_path=shared)):
        pass


def test_two_runs_that_save_their_model_in_the_same_place_are_refused(tmp_path):
    shared = tmp_path / "published" / "model"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "published")
    with held_output(settings(tmp_path / "a", save_path=str(shared))):
        for other in (shared, link / "model"):
            with (
                pytest.raises(UsageError, match=r"^--save_path .*model is in use by another run"),
                held_output(settings(tmp_path / "b", save_path=str(other))),
            ):
                pass
        with held_output(settings(tmp_path / "c", save_path=str(tmp_path / "c" / "inside"))):
            assert names(tmp_path / "c") == {".lock"}
        with whole_folder(shared) as written:  # the lock is not replaced with the folder
            (written / "config.json").write_text("{}")
        with pytest.raises(UsageError, match="in use"), held_output(settings(tmp_path / "b", save_path=str(shared))):
            pass
    assert names(shared) == {"config.json"}
    with held_output(settings(tmp_path / "b", save_path=str(shared), overwrite=True)):
        pass


def test_a_folder_in_which_nothing_can_be_written_is_named_at_the_start(tmp_path):
    with (
        pytest.raises(UsageError, match=r"^--save_path: /proc/\.model\.lock cannot be written: "),
        held_output(settings(tmp_path, save_path="/proc/model")),
    ):
        pass


def test_a_folder_that_is_made_as_a_whole_is_held_meanwhile_and_a_failure_leaves_nothing(tmp_path):
    folder = tmp_path / "model"

    def make(*, fails: bool) -> None:
        with new_output(folder):
            with pytest.raises(UsageError, match="model is in use by another run"), new_output(folder):
                pass
            with whole_folder(folder) as written:
                (written / "config.json").write_text("{}")
                if fails:
                    raise RunError("the disk is full")

    with pytest.raises(RunError):
        make(fails=True)
    assert names(tmp_path) == set()
    folder.mkdir()
    (folder / ".lock").write_text("of a command that was killed")
    make(fails=False)
    assert names(folder) == {"config.json"}
    with pytest.raises(UsageError, match=r"^--output .*model already exists; choose another folder"):
        make(fails=False)
    assert names(folder) == {"config.json"}


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    def refused(output: Path) -> None:
        with held_output(settings(output)):
            raise UsageError("a wrong setting")

    with pytest.raises(UsageError, match="a wrong setting"):
        refused(tmp_path / "new")
    with pytest.raises(UsageError, match="a wrong setting"):
        refused(tmp_path)
    assert names(tmp_path) == {".lock"}
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/run cannot be created: not a directory"):
        refused(tmp_path / "file" / "run")


def test_logs_that_ranks_have_begun_stay(tmp_path):
    add_run(tmp_path)
    paths = run_directory(settings(tmp_path, overwrite=True))
    (paths.logs / "rank3.log").write_text("of a first run with four ranks")
    for rank in (0, 1):
        begin_log(paths, rank, keep=False).write_text(f"of rank {rank}")
    prepare_run_directory(settings(tmp_path, overwrite=True), "", keep=False, num_ranks=2)
    logs = {path.name: path.read_text() for path in paths.logs.iterdir()}
    assert logs == {"rank0.log": "of rank 0", "rank1.log": "of rank 1"}


def test_a_rank_that_is_early_is_no_earlier_run(tmp_path):
    begin = begin_log(run_directory(settings(tmp_path)), 1, keep=False)
    begin.parent.mkdir()
    begin.write_text("rank 1 was faster")
    check_run_directory(settings(tmp_path))


def test_a_run_that_is_not_built_costs_an_earlier_one_its_logs_alone(tmp_path):
    add_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    paths = run_directory(settings(tmp_path, overwrite=True))
    begin_logs(paths, keep=False)
    (paths.logs / "driver.log").write_text("it could not be built")
    del before[paths.logs / "rank0.log"]
    before[paths.logs / "driver.log"] = b"it could not be built"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    prepare_run_directory(settings(tmp_path, overwrite=True), "", keep=False)
    assert names(paths.logs) == {"driver.log"}  # an open file is kept when the folder is prepared


def test_what_a_run_that_was_not_built_left_is_no_earlier_run(tmp_path):
    begin_logs(run_directory(settings(tmp_path)), keep=False)
    (tmp_path / "logs" / "actor-0.log").write_text("no room for the model")
    (tmp_path / "error.log").write_text("Traceback")
    (tmp_path / "error_rank1.log").write_text("Traceback")
    check_run_directory(settings(tmp_path))
    prepare_run_directory(settings(tmp_path), "", keep=False)
    assert names(tmp_path) == {"config.yaml", "logs"}


def test_logs_of_all_processes_go_on_where_a_run_is_continued(tmp_path):
    add_run(tmp_path)
    begin_logs(run_directory(settings(tmp_path)), keep=True)
    assert names(tmp_path / "logs") == {"rank0.log"}


def test_a_log_begins_anew_with_a_new_run_and_goes_on_with_a_continued_one(tmp_path):
    add_run(tmp_path)
    paths = run_directory(settings(tmp_path))
    assert begin_log(paths, 0, keep=True).read_text() == "first run\n"
    assert not begin_log(paths, 0, keep=False).exists()
