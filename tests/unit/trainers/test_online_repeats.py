"""Every online command in this process, on real engines and tiny models: equal settings give equal runs, bit for bit.

Leaves out Ray: the ranks and the rollout engine are called in this process. Everything else is as in a run.
"""

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_fakes import FakeDialogue, FakeEnvironments
from online_fakes import FakeScorer, FakeTracker
from online_settings import online_settings, resolve
from safetensors.torch import load_file
from saved_loops import read_state, write_state
from site_hooks import undocumented
from tiny_vision import save_tiny_vision
from vision_sequences import vision_sequences

from rlhf_cli.agents.records import Action, Reply, Reset, Text
from rlhf_cli.algorithms.table import ALGORITHMS
from rlhf_cli.backends.roles.groups import (
    ActorRole,
    BaseReference,
    CriticRole,
    Dealer,
    FrozenRole,
    ReferenceRole,
    TrainedRole,
)
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, ReferenceRank, SampledRank, TrainedRank
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.config.commands.online import OnlineConfig
from rlhf_cli.data.formats.conversations import Message, plain_message
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.adapters import plan_adapter
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.episodes import EpisodeEngines, EpisodeLimits
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.state import LoopState, first_state

pytestmark = pytest.mark.usefixtures("group_of_one")

PROMPTS = [Prompt([40 + i, 50 + i, 60], f"prompt {i}: ", None, "data.jsonl", i) for i in range(4)]
ITERATIONS = 2


class OneRank:
    """The only rank of a role, called like the ranks that are Ray actors."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def all_each(self, call: Callable[..., Any], work: Sequence[Any]) -> list[Any]:
        return [call(self.target, share) for share in work]


class OneEngine:
    """The only rollout engine, which gets the actor's weights as a push."""

    def __init__(self, pretrain: str, actor: SampledRank, folder: Path) -> None:
        settings = EngineSettings(max_model_len=64, dtype="fp32", max_images_per_prompt=2)
        self._engine = TransformersEngine(pretrain, settings)
        self._actor = actor
        self._sender = WeightSender(ShmTransport(folders=(str(folder),)))
        self._left: list[tuple[int, Generation]] = []

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        return asyncio.run(self._engine.generate(requests, sampling))

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self._left = list(enumerate(self.generate(requests, sampling)))

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [self._left.pop()]

    def cut(self, max_tokens: int) -> None:
        self._left = [one for one in self._left if len(one[1].token_ids) <= max_tokens]

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def receive_weights(self, version: int) -> dict[str, float]:
        manifest = self._sender.send(self._actor.engine_weights(), version).manifest

        async def push() -> None:
            await self._engine.start_weight_update()
            await self._engine.update_weights(manifest or {})
            await self._engine.finish_weight_update(version)

        asyncio.run(push())
        return {}

    def end(self) -> None:
        self._sender.close()
        asyncio.run(self._engine.shutdown())


class Scorer(FakeScorer):
    """A response is worth what its characters add up to, modulo 7."""

    def judge(self, request: ScoreRequest) -> Score:
        value = float(sum(map(ord, request.response)) % 7)
        return Score(value, "scored", parts={"exact": value})


def role_settings(config: OnlineConfig, learning_rate: float) -> RoleSettings:
    return RoleSettings(
        model=config.model,
        deepspeed=config.deepspeed,
        optim=config.optim,
        learning_rate=learning_rate,
        total_steps=2 * ITERATIONS,
        seed=config.batch.seed,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        policy=config.policy,
        adapter=plan_adapter(config.model, config.adapter, seed=1) if config.adapter.lora_rank else None,
    )


def reference_of(settings: RoleSettings, policy: TrainedRole, dealer: Dealer) -> ReferenceRole | BaseReference:
    """Return the model that the run begins with: under an adapter the actor's own, else a copy."""
    if settings.adapter is not None:
        return BaseReference(policy)
    reference = OneRank(ReferenceRank(settings))
    return ReferenceRole(FrozenRole(reference, dealer, takes_turns=False), actor=policy, alpha=0.0)  # type: ignore[arg-type]


def train(
    config: OnlineConfig,
    row: str,
    folder: Path,
    prompts: Sequence[Prompt] = PROMPTS,
    checkpoint: Path | None = None,
    *,
    play: Callable[[OneEngine], Any] = lambda engine: engine,
    scorer: FakeScorer | None = None,
    iterations: int = ITERATIONS,
) -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
    """(metrics and samples of each iteration, the weights that came out).

    The first iteration is saved in the folder `checkpoint`; if that is there already, the run goes on from it. `play`
    makes other engines of the one engine, whose responses are episodes.
    """
    algorithm, settings, dealer = ALGORITHMS[row], role_settings(config, 1e-2), Dealer(1, config.batch, 0.0)

    def trained(role: Any) -> TrainedRole:
        return TrainedRole(OneRank(role), dealer, takes_turns=False)  # type: ignore[arg-type]

    actor = ActorRank(settings)
    critic = CriticRank(settings) if algorithm.critic else None
    engine, tracker = OneEngine(config.model.pretrain, actor, folder), FakeTracker()
    state = first_state(config.policy)
    roles_by_name = {"actor": actor.role} | ({"critic": critic.role} if critic else {})
    if goes_on := checkpoint is not None and checkpoint.exists():
        for name, role in roles_by_name.items():
            role.load(checkpoint / name)
        state = read_state(checkpoint, prompts, online_settings(config, row))
        engine.receive_weights(state.iteration)

    def save(state: LoopState) -> None:
        if checkpoint is not None and not goes_on and state.iteration == 1:
            write_checkpoint(checkpoint, roles_by_name, state)

    policy = trained(actor)
    roles = Roles(
        ActorRole(policy),
        CriticRole(trained(critic)) if critic else None,
        reference_of(settings, policy, dealer),
        None,
        play(engine),
        scorer or Scorer([], fails=lambda index: False),
    )
    train_online(
        roles,
        online_settings(config, row),
        prompts=prompts,
        decode=lambda token_ids: "".join(map(chr, token_ids)),
        state=state,
        total_iterations=iterations,
        save_steps=1,
        hooks=OnlineHooks(tracker, save, lambda: False),
    )
    engine.end()
    return tracker.logged, tracker.rows, {name: weight.clone() for name, weight in actor.engine_weights()}


def write_checkpoint(folder: Path, roles: Mapping[str, TrainedRank], state: LoopState) -> None:
    for name, role in roles.items():
        (folder / name).mkdir(parents=True)
        role.save(folder / name)
    write_state(folder, state)


@pytest.mark.parametrize(
    ("command", "row", "given"),
    [
        ("ppo", "ppo", {}),
        ("reinforce++", "reinforce++", {}),
        ("reinforce++", "reinforce++_group", {"baseline": "group"}),
        ("grpo", "grpo", {}),
        ("grpo", "grpo_passk", {"advantage": "passk"}),
        ("grpo", "gdpo", {"aggregate": "normalize_then_sum", "use_kl_loss": "true", "kl_estimator": "k3"}),
        ("rloo", "rloo", {}),
        ("remax", "remax", {}),
    ],
)
def test_a_run_gives_the_same_numbers_again_and_other_ones_with_another_seed(
    command, row, given, tiny_model_dir, tmp_path
):
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 2, "max_new_tokens": 4}
    common = {"pretrain": tiny_model_dir, "param_dtype": "fp32", "init_kl_coef": 0.1, **small, **given}
    first, second, other = (train(resolve(command, seed=seed, **common), row, tmp_path) for seed in (1, 1, 2))
    assert [step for step, _ in first[0]] == list(range(1, ITERATIONS + 1))
    assert not undocumented(command, [name for _, metrics in first[0] for name in metrics])
    assert first[:2] == second[:2]
    assert first[2].keys() == second[2].keys()
    assert all(weight.equal(second[2][name]) for name, weight in first[2].items())
    assert first[1] != other[1]


def pictured_config(command: str, folder: Path, **given: Any) -> OnlineConfig:
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "train_batch_size": 8, "max_new_tokens": 4}
    config: OnlineConfig = resolve(
        command, pretrain=str(folder), param_dtype="fp32", init_kl_coef=0.1, **small, **given
    )
    return config


def pictured_prompts(folder: Path) -> list[Prompt]:
    """Return prompts with one, no, two and one pictures."""
    return [
        Prompt(one.token_ids[~one.loss_mask].tolist(), f"{i}: ", None, "data.jsonl", i, pictures=one.pictures)
        for i, one in enumerate(vision_sequences(folder, [[(56, 84)], [], [(60, 60), (112, 56)], [(30, 90)]]))
    ]


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_training_on_pictures_moves_the_tower_that_engines_answer_with_repeats_and_goes_on_as_if_never_stopped(
    command, tmp_path
):
    folder = save_tiny_vision("idefics3", tmp_path / "model")
    config, prompts, checkpoint = pictured_config(command, folder), pictured_prompts(folder), tmp_path / "checkpoint"
    first, second = train(config, command, tmp_path, prompts), train(config, command, tmp_path, prompts, checkpoint)
    assert first[:2] == second[:2]
    assert all(weight.equal(second[2][name]) for name, weight in first[2].items())
    logged, rows, weights = train(config, command, tmp_path, prompts, checkpoint)
    assert logged == first[0][1:]
    assert rows == first[1][1:]
    assert all(weight.equal(weights[name]) for name, weight in first[2].items())
    assert max(metrics["rollout_diff_max"] for _, metrics in first[0]) < 1e-6
    before = load_file(folder / "model.safetensors")
    moved = {name for name, weight in first[2].items() if not weight.equal(before[name])}
    assert {name.split(".")[1] for name in moved} >= {"vision_model", "connector", "text_model"}


@pytest.mark.parametrize("command", ["reinforce++", "rloo", "remax"])
def test_other_commands_train_the_tower_that_engines_answer_with(command, tmp_path):
    folder = save_tiny_vision("idefics3", tmp_path / "model")
    logged, _, weights = train(pictured_config(command, folder), command, tmp_path, pictured_prompts(folder))
    assert max(metrics["rollout_diff_max"] for _, metrics in logged) < 1e-6
    before = load_file(folder / "model.safetensors")
    moved = {name.split(".")[1] for name, weight in weights.items() if not weight.equal(before[name])}
    assert moved >= {"vision_model", "connector", "text_model"}


@pytest.mark.parametrize("with_tower", [False, True])
def test_adapters_of_a_vision_model_are_pushed_merged_and_move_the_parts_that_have_them(with_tower, tmp_path):
    folder = save_tiny_vision("qwen2_5_vl", tmp_path / "model")
    config = pictured_config("grpo", folder, lora_rank=4, lora_vision_tower=str(with_tower).lower())
    (_, first), (_, second) = (run := train(config, "grpo", tmp_path, pictured_prompts(folder)))[0]
    assert first["kl"] == 0  # a new adapter changes nothing
    assert second["kl"] > 1e-6
    assert max(first["rollout_diff_max"], second["rollout_diff_max"]) < 1e-5
    before = load_file(folder / "model.safetensors")
    assert run[2].keys() == before.keys()
    moved = {name.split(".")[0] for name, weight in run[2].items() if not weight.equal(before[name])}
    assert moved == ({"model", "visual"} if with_tower else {"model"})


class WorthOfEpisodes(FakeScorer):
    """An episode is worth what its environment gave."""

    def judge(self, request: ScoreRequest) -> Score:
        assert request.episode_reward is not None
        return Score(request.episode_reward, "scored", parts={"environment": request.episode_reward})


def parity_game(*, is_shown: bool = True) -> FakeEnvironments:
    """Whatever the model says first, it gets a token and has to say one of the same parity. Without `is_shown` it gets
    another token than the one that counts.
    """
    counted: dict[int, int] = {}

    def answer(episode: int, turn: int, action: Action) -> Reply:
        if isinstance(action, Reset):
            counted[episode] = 70 + zlib.crc32(f"{action.seed}".encode()) % 2
            return Reply()
        if turn == 1:
            return Reply((chr(counted[episode] if is_shown else 72),))
        assert isinstance(action, Text)
        return Reply((), float(ord(action.text[0]) % 2 == counted[episode] % 2), is_done=True)

    return FakeEnvironments(answer)


def episodes_config(command: str, folder: str, **given: Any) -> OnlineConfig:
    small = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "train_batch_size": 32, "max_new_tokens": 1}
    return resolve(
        command,
        pretrain=folder,
        param_dtype="fp32",
        init_kl_coef=0.001,
        reward_funcs="environment",
        **{"environment": "parity.py", **small, **given},
    )


def episode_prompts(count: int) -> list[Prompt]:
    row = json.dumps({"prompt": "p", "columns": {}, "messages": [plain_message(Message("user", "p"))]})
    return [Prompt([40 + i % 8, 50, 60], f"p{i}", None, "data.jsonl", i, row=row) for i in range(count)]


class StoppedTurns:
    """The engine with turns of one token, which end by themselves."""

    def __init__(self, engine: OneEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [(number, replace(one, finish_reason="stop")) for number, one in self._engine.collect(timeout)]


def play_parity(engine: OneEngine, *, is_shown: bool = True) -> EpisodeEngines:
    return EpisodeEngines(StoppedTurns(engine), parity_game(is_shown=is_shown), FakeDialogue(), EpisodeLimits(4, 32))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_episodes_repeat_and_go_on_as_if_never_stopped(command, tiny_model_dir, tmp_path):
    def run(folder: Path | None) -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
        return train(
            episodes_config(command, tiny_model_dir),
            command,
            tmp_path,
            episode_prompts(8),
            folder,
            play=play_parity,
            scorer=WorthOfEpisodes([], fails=lambda index: False),
        )

    first, again, resumed = run(tmp_path / "checkpoint"), run(None), run(tmp_path / "checkpoint")
    assert first[:2] == again[:2]
    assert first[0][1:] == resumed[0]
    assert all(weight.equal(again[2][name]) and weight.equal(resumed[2][name]) for name, weight in first[2].items())
    metrics = first[0][-1][1]
    assert not undocumented(command, metrics)
    assert max(of_step["rollout_diff_max"] for _, of_step in first[0]) < 1e-5
    assert (metrics["episode/turns"], metrics["response_length"]) == (2.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "is_shown"), [("grpo", True), ("ppo", True), ("grpo", False)])
def test_the_answer_to_an_observation_is_learned_and_nothing_without_one(command, is_shown, tiny_model_dir, tmp_path):
    logged, _, _ = train(
        episodes_config(command, tiny_model_dir, seed=1),
        command,
        tmp_path,
        episode_prompts(240),
        play=partial(play_parity, is_shown=is_shown),
        scorer=WorthOfEpisodes([], fails=lambda index: False),
        iterations=60,
    )
    reward = sum(metrics["reward"] for _, metrics in logged[-5:]) / 5
    assert reward >= 0.95 if is_shown else reward < 0.65
