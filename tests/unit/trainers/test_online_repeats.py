"""All online commands in one process on real engines and tiny models: equal settings give bitwise equal runs.

Only Ray is left out: ranks and the rollout engine are called in this process.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_fakes import FakeEnvironments, episode_engines
from online_fakes import FakeScorer, FakeTracker
from online_settings import online_settings, resolve
from safetensors.torch import load_file
from samples import sample_of
from saved_loops import read_state, write_state
from site_hooks import undocumented
from tiny_vision import save_tiny_vision
from transformers import AutoModelForCausalLM
from vision_sequences import vision_sequences

from rlhf_cli.agents.records import Action, Reply, Reset, Text
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.roles.groups import (
    ActorRole,
    BaseReference,
    CriticRole,
    ReferenceRole,
)
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, FrozenPolicyRank, SampledRank, TrainedRank
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.formats.conversations import Message, plain_message
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.models.adapters import plan_adapter
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.evaluation import EvaluationState, EvaluationTask, Evaluator
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.multi_turn import MultiTurnEngines
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import LoopState, first_state

pytestmark = pytest.mark.usefixtures("group_of_one")

PROMPTS = [Prompt([40 + i, 50 + i, 60], f"prompt {i}: ", None, "data.jsonl", i) for i in range(4)]
ITERATIONS = 2


class OneRank:
    """The only rank of a role, with the interface of a group of Ray actors."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def all(self, call: Callable[..., Any]) -> list[Any]:
        return [call(self.target)]

    def all_each(self, call: Callable[..., Any], work: Sequence[Any]) -> list[Any]:
        return [call(self.target, share) for share in work]

    all_stored = all_each


class OneEngine:
    """The only rollout engine, which receives the actor's weights directly."""

    def __init__(self, pretrain: str, actor: SampledRank, folder: Path) -> None:
        settings = EngineSettings(max_model_len=64, dtype="fp32", max_images_per_prompt=2)
        self._thread = LoopThread("engine")
        self._engine = TransformersEngine(pretrain, settings)
        self._actor = actor
        self._sender = WeightSender(ShmTransport(folders=(str(folder),)))
        self._left: list[tuple[int, Generation]] = []

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        return self._thread.run(self._engine.generate(requests, sampling))

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self._left = list(enumerate(self.generate(requests, sampling)))

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
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

        self._thread.run(push())
        return {}

    def end(self) -> None:
        self._sender.close()
        self._thread.end(self._engine.shutdown)


class Scorer(FakeScorer):
    """Scores a response by the sum of its characters modulo 7."""

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


def reference_of(
    settings: RoleSettings, policy: ActorRole, planner: MicroBatchPlanner
) -> ReferenceRole | BaseReference:
    """Return the reference model: the base of the actor's adapter, or a copy."""
    if settings.adapter is not None:
        return BaseReference(policy)
    reference = OneRank(FrozenPolicyRank(settings))
    return ReferenceRole(reference, planner, takes_turns=False)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Parts:
    """Parts of a run that differ from the default.

    `play` wraps the engine so that responses are episodes. Held-out prompts are evaluated before the first iteration
    and after each one.
    """

    play: Callable[[OneEngine], Any] = lambda engine: engine
    scorer: FakeScorer | None = None
    held_out: Sequence[Prompt] = ()
    tracker: FakeTracker | None = None


PLAIN = Parts()


def train(
    config: OnlineConfig,
    row: str,
    folder: Path,
    prompts: Sequence[Prompt] = PROMPTS,
    checkpoint: Path | None = None,
    *,
    iterations: int = ITERATIONS,
    parts: Parts = PLAIN,
) -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
    """Train and return (metrics and samples of each iteration, final weights).

    The first iteration is saved in the folder `checkpoint`; if that exists already, the run is resumed from it.
    """
    algorithm, settings, planner = ESTIMATORS[row], role_settings(config, 1e-2), MicroBatchPlanner(1, config.batch, 0.0)

    actor = ActorRank(settings)
    critic = CriticRank(settings) if algorithm.critic else None
    engine, tracker = OneEngine(config.model.pretrain, actor, folder), parts.tracker or FakeTracker()
    state = first_state(config.policy)
    roles_by_name = {"actor": actor} | ({"critic": critic} if critic else {})
    if goes_on := checkpoint is not None and checkpoint.exists():
        for name, role in roles_by_name.items():
            role.load(checkpoint / name)
        state = read_state(checkpoint, prompts, online_settings(config, row))
        engine.receive_weights(state.iteration)

    def save(state: LoopState) -> None:
        if checkpoint is not None and not goes_on and state.iteration == 1:
            write_checkpoint(checkpoint, roles_by_name, state)

    policy = ActorRole(OneRank(actor), planner, takes_turns=False)  # type: ignore[arg-type]
    roles = Roles(
        actor=policy,
        engines=parts.play(engine),
        scorer=parts.scorer or Scorer([], fails=lambda index: False),
        critic=CriticRole(OneRank(critic), planner, takes_turns=False) if critic else None,  # type: ignore[arg-type]
        frozen_policies={"ref": reference_of(settings, policy, planner)},
    )

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    every = EvaluationConfig(eval_dataset="sets", eval_steps=1)
    settings_of_loop = online_settings(config, row)
    greedy = replace(settings_of_loop.sampling, greedy=True)
    task = EvaluationTask(
        every, config.reward, parts.held_out, decode, greedy, 42, iterations, engines_lose_weights=False
    )
    evaluator = Evaluator(task, roles, tracker, save_best=lambda best: None, state=EvaluationState())  # type: ignore[arg-type]
    train_online(
        roles,
        RolloutSource(roles.engines, roles.scorer, settings_of_loop, prompts, decode, tracker.message),
        state=state,
        total_iterations=iterations,
        save_steps=1,
        hooks=OnlineHooks(tracker, save, lambda: False, evaluator),
    )
    engine.end()
    return tracker.logged, tracker.rows, {name: weight.clone() for name, weight in actor.engine_weights()}


def write_checkpoint(folder: Path, roles: Mapping[str, TrainedRank], state: LoopState) -> None:
    for name, role in roles.items():
        (folder / name).mkdir(parents=True)
        role.save(folder / name)
    write_state(folder, state)


BY_ESTIMATOR: list[tuple[str, str, dict[str, str]]] = [
    ("ppo", "ppo", {}),
    ("reinforce++", "reinforce++", {}),
    ("reinforce++", "reinforce++_group", {"baseline": "group"}),
    ("grpo", "grpo", {}),
    ("grpo", "grpo_passk", {"advantage": "passk"}),
    ("grpo", "grpo_maxrl", {"advantage": "maxrl"}),
    ("grpo", "grpo_dpo", {"advantage": "dpo", "use_kl_loss": "false", "kl_estimator": "k1"}),
    ("grpo", "gdpo", {"aggregate": "normalize_then_sum", "use_kl_loss": "true", "kl_estimator": "k3"}),
    ("grpo", "gigpo", {"advantage": "gigpo", "environment": "game.py", "reward_funcs": "exact"}),
    ("rloo", "rloo", {}),
    ("remax", "remax", {}),
]


def test_runs_with_all_estimators_are_repeated():
    run = {row for _, row, _ in BY_ESTIMATOR}
    assert run == {row.name for row in ESTIMATORS.values() if row.advantages}, "add the estimator to BY_ESTIMATOR"


@pytest.mark.parametrize(("command", "row", "given"), BY_ESTIMATOR)
def test_a_run_gives_the_same_numbers_again_and_other_ones_with_another_seed(
    command, row, given, tiny_model_dir, tmp_path
):
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 2, "max_new_tokens": 4}
    common = {"pretrain": tiny_model_dir, "param_dtype": "fp32", "init_kl_coef": 0.1, **small, **given}
    first, second, other = (train(resolve(command, seed=seed, **common), row, tmp_path) for seed in (1, 1, 2))
    assert [step for step, _ in first[0]] == list(range(1, ITERATIONS + 1))
    names = undocumented(command, [name for _, metrics in first[0] for name in metrics])
    assert not names, "describe the metrics in docs/metrics.yaml"
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
    """Return prompts with one, no, two and one images."""
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
    """Scores an episode with the reward of its environment."""

    def judge(self, request: ScoreRequest) -> Score:
        assert request.episode_reward is not None
        return Score(request.episode_reward, "scored", parts={"environment": request.episode_reward})


def parity_game(*, is_shown: bool = True) -> FakeEnvironments:
    """Play a game in which the model must answer with a token of the same parity as the observation.

    Without `is_shown`, the observation differs from the token that counts.
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
    """The engine with one-token turns that end by themselves."""

    def __init__(self, engine: OneEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [(number, replace(one, finish_reason="stop")) for number, one in await self._engine.collect(timeout)]


def play_parity(engine: OneEngine, *, is_shown: bool = True) -> MultiTurnEngines:
    return episode_engines(StoppedTurns(engine), parity_game(is_shown=is_shown), max_turns=4, max_len=32)


class Recorded:
    """Plays the parity game and records the environment seeds."""

    def __init__(self) -> None:
        self._games: list[FakeEnvironments] = []

    def __call__(self, engine: OneEngine) -> MultiTurnEngines:
        game = parity_game()
        self._games.append(game)
        return episode_engines(StoppedTurns(engine), game, max_turns=4, max_len=32)

    @property
    def seeds(self) -> list[int]:
        return [action.seed for _, action in self._games[-1].actions if isinstance(action, Reset)]


def play_episodes(command: str, folder: str, tmp_path: Path, **given: Any) -> tuple[Any, Recorded]:
    """Run a command on the parity game; return the run and the recorded environments."""
    recorded, config = Recorded(), episodes_config(command, folder, **given.pop("settings", {}))
    prompts = given.pop("prompts", episode_prompts(8))
    parts = Parts(recorded, WorthOfEpisodes([], fails=lambda index: False), **given)
    return train(config, command, tmp_path, prompts, parts=parts), recorded


def test_the_greedy_episode_of_remax_begins_in_the_same_environment_as_the_sampled_ones(tiny_model_dir, tmp_path):
    settings = {"n_samples_per_prompt": 2, "train_batch_size": 8}
    (logged, rows, _), recorded = play_episodes("remax", tiny_model_dir, tmp_path, settings=settings)
    assert len(recorded.seeds) == ITERATIONS * (8 + 4)
    for first in (0, 12):
        sampled, greedy = recorded.seeds[first : first + 8], recorded.seeds[first + 8 : first + 12]
        assert sampled[::2] == sampled[1::2] == greedy
        assert len(set(greedy)) == 4
    for (_, metrics), (_, cells) in zip(logged, rows, strict=True):
        assert metrics["episode/turns"] == 2.0
        assert metrics["greedy_reward"] in {0.0, 0.25, 0.5, 0.75, 1.0}
        assert metrics["reward"] == sum(row["reward"] for row in cells) / 8
        assert metrics["rollout_diff_max"] < 1e-5


def test_dynamic_sampling_replaces_prompts_whose_episodes_are_all_alike(tiny_model_dir, tmp_path):
    settings = {
        "dynamic_filtering": True,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
    }
    given = {"settings": settings, "prompts": episode_prompts(40)}
    (first, recorded), (second, _) = (play_episodes("grpo", tiny_model_dir, tmp_path, **given) for _ in range(2))
    assert first[:2] == second[:2]
    assert len(recorded.seeds) > ITERATIONS * 4  # some prompts were replaced
    for _, cells in first[1]:
        by_prompt: dict[str, set[float]] = {}
        for row in cells:
            assert [message["role"] for message in row["messages"]] == ["assistant", "user", "assistant"]
            by_prompt.setdefault(row["prompt"], set()).add(row["reward"])
        assert [*by_prompt.values()] == [{0.0, 1.0}] * 2


class EvaluationTracker(FakeTracker):
    """Also records evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[tuple[dict[str, float], list[dict[str, Any]]]] = []

    def evaluation(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None:
        self.evaluations.append((metrics, []))

    def evaluation_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.evaluations[step][1].extend(rows)


def test_held_out_prompts_are_episodes_too_and_change_nothing_in_training(tiny_model_dir, tmp_path):
    plain, _ = play_episodes("grpo", tiny_model_dir, tmp_path)
    tracker = EvaluationTracker()
    given = {"held_out": episode_prompts(3), "tracker": tracker}
    evaluated, recorded = play_episodes("grpo", tiny_model_dir, tmp_path, **given)
    assert evaluated[:2] == plain[:2]
    assert all(weight.equal(plain[2][name]) for name, weight in evaluated[2].items())
    assert len(tracker.evaluations) == ITERATIONS + 1
    for metrics, cells in tracker.evaluations:
        assert metrics["reward"] == sum(row["reward"] for row in cells) / 3
        assert [len(row["messages"]) for row in cells] == [3, 3, 3]
    starts = [(3 + 32) * number for number in range(ITERATIONS + 1)]
    assert len({tuple(recorded.seeds[start : start + 3]) for start in starts}) == 1  # the same tasks each time


def test_only_sampled_tokens_have_a_gradient(tiny_model_dir):
    """The gradient of an episode equals that of its turns, each after all preceding tokens, in the plain model."""
    turns = ((0, 3), (7, 9), (12, 16))
    generation = Generation([*range(30, 46)], [0.0] * 9, "stop", 0, Episode(turns, (0.0, 0.0, 1.0)))
    policy = PolicyModel(load_causal_lm(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32")))
    logprobs, _ = policy(pack([sample_of(Prompt([5, 6, 7], "p", None, "d", 0), generation).sequence]))
    assert logprobs.shape == (9,)
    logprobs.sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, *generation.token_ids]])
    for start, end in turns:
        log_p = plain(input_ids=ids[:, : 3 + end]).logits[0].log_softmax(-1)
        log_p[range(2 + start, 2 + end), ids[0, 3 + start : 3 + end]].sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name.removeprefix("model.")], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_episodes_repeat_and_go_on_as_if_never_stopped(command, tiny_model_dir, tmp_path):
    def run(folder: Path | None) -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
        return train(
            episodes_config(command, tiny_model_dir),
            command,
            tmp_path,
            episode_prompts(8),
            folder,
            parts=Parts(play_parity, WorthOfEpisodes([], fails=lambda index: False)),
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
        parts=Parts(partial(play_parity, is_shown=is_shown), WorthOfEpisodes([], fails=lambda index: False)),
        iterations=60,
    )
    reward = sum(metrics["reward"] for _, metrics in logged[-5:]) / 5
    assert reward >= 0.95 if is_shown else reward < 0.65
