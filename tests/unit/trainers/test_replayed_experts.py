"""Experts of the rollout engine reach the actor, which replays them, and no other model."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from online_fakes import WITH_REFERENCE, FakeEngines, FakeModel, Run

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.rollouts import Generation, GenerationRequest


class Engines(FakeEngines):
    """Engines that send each token to the expert with its number."""

    def _answer(self, request: GenerationRequest) -> Generation:
        response = super()._answer(request)
        token_ids = request.prompt_ids + response.token_ids
        return replace(response, routed_experts=np.array(token_ids[:-1], dtype=np.uint8)[:, None, None])


class Model(FakeModel):
    """A model that collects the experts of its sequences."""

    def __init__(self, name: str, journal: list[str], **more: float) -> None:
        super().__init__(name, journal, **more)
        self.experts: list[list[int] | None] = []

    def _collect(self, sequences: Sequence[TokenSequence]) -> None:
        found = [one.routed_experts for one in sequences]
        self.experts += [None if own is None else own.ravel().tolist() for own in found]

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        self._collect(sequences)
        return super().logprobs(sequences)

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        self._collect(sequences)
        return super().values(sequences)

    def update(self, samples, *args, **more):
        self._collect(samples)
        return super().update(samples, *args, **more)


def test_only_the_actor_replays_experts_in_old_and_new_log_probs():
    run = Run(policy=WITH_REFERENCE)
    run.engines = Engines(run.journal)
    run.actor, run.critic = Model("actor", run.journal), Model("critic", run.journal)
    run.reference = Model("ref", run.journal)
    run(total_iterations=1)
    ((updated, _),) = run.actor.updates
    expected = [sample.token_ids[:-1].tolist() for sample in updated]
    assert run.actor.experts == expected * 2
    assert run.critic.experts == [None] * 2 * len(expected)
    assert run.reference.experts == [None] * len(expected)
    json.dumps(run.tracker.rows)  # experts would be too large for samples.jsonl, and are arrays
