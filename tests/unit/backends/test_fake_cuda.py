"""Training code on fake CUDA tensors: devices, dtypes, gradients, and waits of the host, without a GPU."""

from typing import Any, get_args

import pytest
from fake_cuda.start import run_fake

from rlhf_cli.config.policy import POLICY_LOSSES, LossAgg, RolloutCorrection
from rlhf_cli.config.preference import PAIR_LOSSES

WORDS = {*POLICY_LOSSES, *get_args(LossAgg), *get_args(RolloutCorrection), *PAIR_LOSSES, "LoRA", "critic", "rm", "prm"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_fake("cases.py")


def test_every_pass_runs_on_one_device_without_waiting(results: dict[str, Any]) -> None:
    check(results)


@pytest.mark.slow  # their layers are similar to those of other cases
def test_similar_models_run_too() -> None:
    check(run_fake("cases.py", "similar "))


def check(results: dict[str, Any]) -> None:
    failed = {name: result for name, result in results.items() if result["error"] or result["waits"]}
    assert not failed
    # A case that computed nothing would pass.
    assert min(result["operators"] for result in results.values()) > 300


def test_cases_cover_all_losses(results: dict[str, Any]) -> None:
    assert {word for name in results for word in name.split()} >= WORDS
