"""Custom rollout engines: the documented example generates, and a class without the methods is rejected."""

import asyncio

import pytest
from extending_page import page_file
from online_settings import resolve

from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.engine import EngineSettings, RolloutEngine
from rlhf_cli.backends.rollout.engine_host import make_engine
from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.config.rollout import ENGINE_METHODS
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError


def test_the_page_s_engine_generates_to_the_end(tmp_path, tiny_model_dir) -> None:
    path = page_file(tmp_path, "patient_engine.py")
    config = resolve("rloo", rollout_backend=f"{path}:PatientEngine")
    require_plugins(config)
    settings = EngineSettings(max_model_len=32, dtype="fp32", num_threads=1)
    engine = make_engine(rollout_backend(config.engine), tiny_model_dir, settings)

    async def whole_and_collected() -> tuple[list[int], list[int]]:
        requests, sampling = [GenerationRequest([5, 6, 7], seed=3)], SamplingParams(12, greedy=True)
        [whole] = await engine.generate(requests, sampling)
        await engine.begin(requests, sampling)
        await engine.cut(2)
        found: list[int] = []
        is_last = False
        while not is_last:
            arrivals = await engine.collect()
            found += [token for _, response in arrivals.responses for token in response.token_ids]
            is_last = arrivals.is_last
        await engine.shutdown()
        return whole.token_ids, found

    whole, found = asyncio.run(whole_and_collected())
    assert whole == found
    assert len(found) > 2


def test_a_class_without_the_methods_of_an_engine_is_refused(tmp_path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    def begin(self): pass\n")
    with pytest.raises(UsageError, match="Own has no method generate; it needs generate, begin, add, collect, cut"):
        require_plugins(resolve("rloo", rollout_backend=f"{tmp_path}/own.py:Own"))


def test_the_methods_that_a_class_needs_are_those_of_the_protocol() -> None:
    assert [name for name in vars(RolloutEngine) if not name.startswith("_")] == list(ENGINE_METHODS)
