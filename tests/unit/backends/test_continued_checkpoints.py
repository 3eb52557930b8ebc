"""Checkpoints resumed at another ZeRO stage or rank count, on one rank; tests/e2e has more ranks."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import OPTIM, Items, Layout, farthest, load_policy, make_engine, make_sequences, train, weights_of
from trained_folders import Trained

from rlhf_cli.backends.training.checkpoint import verify
from rlhf_cli.backends.training.checkpoint_layout import (
    Shard,
    StateLayout,
    continuation_notice,
    read_layout,
    write_layout,
)
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.backends.training.reshaping import layout_of
from rlhf_cli.errors import UsageError

pytestmark = pytest.mark.usefixtures("group_of_one")

STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9], [9, 1]]


def items() -> Items:
    return Items(make_sequences(10))


def begun(model: str, folder: Path, stage: int, **options: Any) -> tuple[Any, DeepSpeedEngine]:
    """Train an engine for two steps and save it in the folder."""
    hf_model, module = load_policy(model, stage)
    engine = make_engine(module, stage, **options)
    train(engine, items(), STEPS[:2], Layout())
    engine.save(folder)
    return hf_model, engine


def assert_goes_on(model: str, folder: Path, stage: int, straight: tuple[Any, DeepSpeedEngine], **options: Any) -> None:
    """Load the folder at a stage and check that two more steps equal those of the saved engine."""
    hf_model, module = load_policy(model, stage)
    engine = make_engine(module, stage, **options)
    engine.load(folder)
    found, expected = (train(one, items(), STEPS[2:], Layout()) for one in (engine, straight[1]))
    for metrics, others in zip(found, expected, strict=True):
        assert metrics == pytest.approx(others, rel=1e-5)
    assert farthest(weights_of(engine, hf_model), weights_of(straight[1], straight[0])) < 1e-6


@pytest.mark.parametrize(("saved", "stage"), [(0, 3), (3, 1), (2, 0), (1, 2)])
def test_a_mixture_of_experts_goes_on_at_another_stage(tiny_moe_dir, tmp_path, saved, stage):
    assert_goes_on(tiny_moe_dir, tmp_path, stage, begun(tiny_moe_dir, tmp_path, saved))


@pytest.mark.e2e  # compiles DeepSpeed's optimizer on first use: a minute on two idle cores
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
@pytest.mark.parametrize(("saved", "stage"), [(2, 2), (1, 3)])
def test_an_optimizer_in_host_memory_takes_over_from_one_that_is_not_and_back(
    tiny_model_dir, tmp_path, saved, stage, before, after
):
    straight = begun(tiny_model_dir, tmp_path, saved, adam_offload=before)
    assert_goes_on(tiny_model_dir, tmp_path, stage, straight, adam_offload=after)


def test_skipped_steps_are_counted_on(tiny_model_dir, tmp_path):
    _, engine = begun(tiny_model_dir, tmp_path / "none", 2)
    (batch, *_), _ = Layout().share().micro_batches(items(), np.array(STEPS[0]))
    engine.train_step([batch], lambda model, pack: (model(pack)[0].sum() * torch.inf, {}))
    engine.save(tmp_path)
    other = make_engine(load_policy(tiny_model_dir, 3)[1], 3)
    other.load(tmp_path)
    assert train(other, items(), STEPS[2:3], Layout())[0]["skipped_steps"] == 1


def test_a_checkpoint_without_a_good_step_has_no_moments_to_take_over(tiny_model_dir, tmp_path):
    hf_model, module = load_policy(tiny_model_dir, 2)
    engine = make_engine(module, 2)
    engine.save(tmp_path)
    assert_goes_on(tiny_model_dir, tmp_path, 3, (hf_model, engine))


def by_two_ranks(folder: Path) -> None:
    """Convert a stage 0 checkpoint, which has everything on every rank, to one that two ranks wrote."""
    path = folder / "layout_rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_ranks": 2}))


def test_random_numbers_of_another_number_of_ranks_come_from_the_seed_and_the_step(tiny_model_dir, tmp_path):
    begun(tiny_model_dir, tmp_path, 0)
    drawn = []
    for seed in (5, 5, 6):
        engine = make_engine(load_policy(tiny_model_dir, 0)[1], 0)
        seed_everything(seed)
        by_two_ranks(tmp_path)
        engine.load(tmp_path)
        drawn.append((torch.rand(1).item(), np.random.rand()))
    assert drawn[0] == drawn[1] != drawn[2]
    seed_everything(5 + 2)
    assert drawn[0] == (torch.rand(1).item(), np.random.rand())


def test_random_states_stay_when_the_stage_alone_is_another(tiny_model_dir, tmp_path):
    _, engine = begun(tiny_model_dir, tmp_path, 2)
    seed_everything(11)
    engine.save(tmp_path)
    drawn = torch.rand(1).item()
    seed_everything(12)
    make_engine(load_policy(tiny_model_dir, 3)[1], 3).load(tmp_path)
    assert torch.rand(1).item() == drawn


def test_a_checkpoint_is_only_read(tiny_model_dir, tmp_path):
    """Repartitioning must not change the checkpoint, whether or not it succeeds."""
    checkpoint = Trained(tmp_path, tiny_model_dir, stage=2).checkpoint
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    make_engine(load_policy(tiny_model_dir, 3)[1], 3).load(checkpoint / "model")
    verify(checkpoint)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_another_model_is_no_continuation(tiny_model_dir, tiny_llama_dir, tmp_path):
    begun(tiny_model_dir, tmp_path, 2)
    with pytest.raises(AssertionError, match="checkpoint and model have different weights"):
        make_engine(load_policy(tiny_llama_dir, 3)[1], 3).load(tmp_path)


def test_a_missing_part_is_named(tiny_model_dir, tmp_path):
    begun(tiny_model_dir, tmp_path, 2)
    next(tmp_path.rglob("*optim_states.pt")).unlink()
    with pytest.raises(UsageError, match=r"deepspeed has no \*zero_pp_rank_0_.*: the checkpoint is incomplete"):
        make_engine(load_policy(tiny_model_dir, 3)[1], 3).load(tmp_path)


def notice(folder: Path, *, zero_stage: int, num_ranks: int) -> list[str]:
    return continuation_notice(folder, what="critic", zero_stage=zero_stage, num_ranks=num_ranks)


def test_a_line_names_ranks_and_stages_and_the_numbers_that_are_not_the_same_to_the_bit(tiny_model_dir, tmp_path):
    begun(tiny_model_dir, tmp_path, 0)
    assert notice(tmp_path, zero_stage=0, num_ranks=1) == []
    assert notice(tmp_path, zero_stage=3, num_ranks=1) == [
        "The critic resumes with 1 rank at ZeRO stage 3 from a checkpoint with 1 rank at ZeRO stage 0: sums are "
        "grouped differently, so results are equal up to rounding, not bit-identical"
    ]
    (line,) = notice(tmp_path, zero_stage=0, num_ranks=8)
    assert "with 8 ranks at ZeRO stage 0 " in line
    assert "sums are grouped differently and random numbers start from the seed, so" in line


@pytest.mark.parametrize(
    "given", [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 4}, {"zero_stage": 3}], ids=str
)
def test_states_of_split_layers_go_on_in_the_same_layout_alone(tmp_path, given):
    write_layout(StateLayout(2, 4, "AdamW", [], [], 2, {"weight": Shard([3, 4], 1)}), tmp_path, rank=0)
    assert read_layout(tmp_path).shards == {"weight": Shard([3, 4], 1)}
    place = {"zero_stage": 2, "num_ranks": 4, "tensor_parallel_size": 2}
    assert continuation_notice(tmp_path, what="actor", **place) == []
    with pytest.raises(
        UsageError, match="cannot be partitioned again; use 4 ranks at ZeRO stage 2 and tensor_parallel_size 2"
    ):
        continuation_notice(tmp_path, what="actor", **place | given)


def test_a_checkpoint_of_an_earlier_version_is_refused(tiny_model_dir, tmp_path):
    begun(tiny_model_dir, tmp_path, 2)
    (tmp_path / "layout_rank0.json").unlink()
    with pytest.raises(UsageError, match=r"cannot be resumed: layout_rank0\.json is missing"):
        notice(tmp_path, zero_stage=2, num_ranks=1)


def test_states_that_cannot_be_cut_anew_are_named(tiny_model_dir, tmp_path):
    """Adafactor stores row and column sums of whole matrices, which cannot be repartitioned."""
    _, module = load_policy(tiny_model_dir, 0)
    matrices = [p for p in module.parameters() if p.dim() == 2]
    optimizer = torch.optim.Adafactor(matrices)
    for parameter in matrices:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = layout_of(SimpleNamespace(optimizer=optimizer, module=module), zero_stage=0)
    assert (found.optimizer, found.uncut_states) == ("Adafactor", ["col_var", "row_var"])

    begun(tiny_model_dir, tmp_path, 2)
    path = tmp_path / "layout_rank0.json"
    record = json.loads(path.read_text()) | {"optimizer": "Adafactor", "uncut_states": ["col_var", "row_var"]}
    path.write_text(json.dumps(record))
    assert notice(tmp_path, zero_stage=2, num_ranks=1) == []
    with pytest.raises(
        UsageError, match=r"with 2 ranks at ZeRO stage 2: the optimizer Adafactor has states that cannot"
    ):
        notice(tmp_path, zero_stage=2, num_ranks=2)


def test_a_layout_is_read_as_it_was_written(tiny_model_dir, tmp_path):
    _, engine = begun(tiny_model_dir, tmp_path, 3)
    folder = tmp_path / "again"
    folder.mkdir()
    shutil.copy(tmp_path / "layout_rank0.json", folder)
    found = read_layout(folder)
    assert (found.zero_stage, found.num_ranks, found.optimizer, found.uncut_states) == (3, 1, "AdamW", [])
    assert sum(fragment.length for fragment in found.fragments) == sum(p.ds_numel for p in engine.module.parameters())


@pytest.mark.parametrize(
    ("optimizer", "dtype", "saved", "stage"),
    [("muon", "fp32", 0, 2), ("muon", "fp32", 2, 1), ("adamw_bf16", "bf16", 1, 3), ("adamw_bf16", "bf16", 3, 0)],
)
def test_states_of_every_optimizer_are_cut_anew(tiny_model_dir, tmp_path, optimizer, dtype, saved, stage):
    """AdamW in bf16 draws other noise at another stage, so losses are close but not equal."""
    optim = OPTIM.model_copy(update={"optim": optimizer})
    losses = []
    for number in (saved, stage):
        _, module = load_policy(tiny_model_dir, number, dtype=dtype)
        engine = make_engine(module, number, dtype=dtype, optim=optim)
        if number == saved:
            train(engine, items(), STEPS[:2], Layout())
            engine.save(tmp_path)
        else:
            engine.load(tmp_path)
        losses.append([step["loss"] for step in train(engine, items(), STEPS[2:], Layout())])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "fp32" else 5e-3)
