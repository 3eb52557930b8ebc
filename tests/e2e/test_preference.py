"""End-to-end tests of `rlhf rm`, `dpo` and `kto`: they learn, and resume exactly after a kill."""

import json
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from forked import run_rlhf, started_rlhf
from safetensors.torch import load_file
from torch.utils.cpp_extension import get_default_build_root
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.environment import user_cache
from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MEASURED = ("time/", "perf/", "memory/")
STEPS = 12
OPTIONS = {"rm": "", "dpo": "--ref_sync_steps 2 --ref_mixup_alpha 0.5", "kto": ""}
RANKS = "--num_processes 2"


class Place:
    """Folder with a tiny model, preference pairs and labelled responses; correct sums are preferred to words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = random.Random(0)
        pairs, labelled = [], []
        for _ in range(64):
            a, b = rng.randrange(10, 99), rng.randrange(10, 99)
            pair = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": rng.choice(["no idea", "many", "a lot"])}
            pairs.append(pair | {"margin": 0.5})
            is_good = rng.random() < 0.5
            labelled.append(
                {"prompt": pair["prompt"], "completion": pair["chosen" if is_good else "rejected"], "label": is_good}
            )
        for name, rows in (("pairs", pairs), ("labelled", labelled)):
            for part, chosen in (("train", rows[:48]), ("held_out", rows[48:])):
                lines = [json.dumps(row) for row in chosen]
                (folder / f"{name}_{part}.jsonl").write_text("\n".join(lines) + "\n")
        built = user_cache("kernels")
        built.mkdir(parents=True, exist_ok=True)
        own = folder / "cache" / "rlhf-cli"
        own.mkdir(parents=True)
        (own / "kernels").symlink_to(built)  # compiled once for all tests
        (own.parent / "torch_extensions").symlink_to(get_default_build_root())
        size = "--hidden_size 32 --intermediate_size 48 --num_hidden_layers 2 --num_attention_heads 4 --vocab_size 300"
        words = f"scratch --dataset {folder / 'pairs_train.jsonl'} {size} --output {folder / 'tiny'}"
        run_rlhf(*words.split())

    @property
    def caches(self) -> dict[str, str]:
        """Return environment variables that make commands share compiled kernels, but no other caches."""
        return {"XDG_CACHE_HOME": str(self.folder / "cache")}

    def words(self, command: str, name: str, more: str = "") -> list[str]:
        kind = "labelled" if command == "kto" else "pairs"
        data = (
            f"--dataset {self.folder / f'{kind}_train.jsonl'} --eval_dataset {self.folder / f'{kind}_held_out.jsonl'}"
        )
        batch = f"--train_batch_size 16 --max_epochs 4 --max_steps {STEPS} --learning_rate 1e-2 --param_dtype fp32"
        words = (
            f"{command} --pretrain {self.folder / 'tiny'} {data} {batch} --no_use_tensorboard "
            f"--output {self.folder / name} {more}"
        )
        return words.split()

    def run(self, command: str, name: str, more: str = "") -> Path:
        run_rlhf(*self.words(command, name, more), environment=self.caches)
        return self.folder / name

    def whole(self, command: str) -> Path:
        """Return the folder of an uninterrupted two-rank run, which is started on first use."""
        folder = self.folder / f"{command}_whole"
        return folder if folder.exists() else self.run(command, folder.name, f"{OPTIONS[command]} {RANKS}")

    def alone(self, command: str) -> Path:
        """Return the folder of an uninterrupted one-rank run, which is started on first use."""
        folder = self.folder / f"{command}_alone"
        more = f"{OPTIONS[command]} --save_steps {STEPS - 2}"
        return folder if folder.exists() else self.run(command, folder.name, more)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("preference"))


def metrics_of(run: Path) -> dict:
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}
        for step, metrics in read_metrics(run).items()
    }


def assert_same_weights(one: Path, other: Path) -> None:
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    assert [name for name, weight in weights.items() if not weight.equal(others[name])] == []


def kill_after_a_checkpoint(words: list[str], run: Path, environment: Mapping[str, str]) -> None:
    with started_rlhf(*words, environment=environment) as command:
        deadline = time.monotonic() + 300
        while not list(run.glob("checkpoints/step_*")):
            assert command.is_running(), command.printed()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command.kill_with_children()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rm", "dpo", "kto"])
def test_two_killed_ranks_end_as_two_never_stopped(place, command):
    whole = place.whole(command)
    killed, more = place.folder / f"{command}_killed", f"{OPTIONS[command]} {RANKS} --save_steps 1"
    kill_after_a_checkpoint(place.words(command, killed.name, more), killed, place.caches)
    assert len(metrics_of(killed)) < len(metrics_of(whole))
    place.run(command, killed.name, f"{more} --load_checkpoint")
    assert metrics_of(killed) == metrics_of(whole)
    assert_same_weights(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "stage"), [("rm", 3), ("dpo", 1)])
def test_one_rank_at_another_stage_ends_a_run_of_two(place, command, stage):
    """Resume the killed run from step 10; the merged checkpoint of step 12 equals the saved model."""
    continued = Path(shutil.copytree(place.folder / f"{command}_killed", place.folder / f"{command}_by_one"))
    for step in (11, 12):
        shutil.rmtree(continued / "checkpoints" / f"step_{step:06d}")
    more = f"{OPTIONS[command]} --zero_stage {stage} --save_steps 1 --load_checkpoint"
    said = run_rlhf(*place.words(command, continued.name, more), environment=place.caches)
    assert f"The model resumes with 1 rank at ZeRO stage {stage} from a checkpoint with 2 ranks" in " ".join(
        said.split()
    )
    expected, found = metrics_of(place.whole(command)), metrics_of(continued)
    assert found.keys() == expected.keys()
    for step, metrics in found.items():
        assert metrics == pytest.approx(expected[step], rel=1e-4, abs=1e-5)
    checkpoint = continued / "checkpoints" / "step_000012"
    run_rlhf("merge", "--model", checkpoint, "--output", continued / "merged")
    merged, model = (load_file(continued / name / "model.safetensors") for name in ("merged", "model"))
    assert [name for name, weight in model.items() if not weight.equal(merged[name])] == []


def test_two_ranks_that_share_sequences_end_a_run_of_one(place):
    """Tests kto, whose baseline is a mean over all ranks, from step 10."""
    alone = place.alone("kto")
    continued = Path(shutil.copytree(alone, place.folder / "kto_by_two"))
    shutil.rmtree(continued / "checkpoints" / f"step_{STEPS:06d}")
    place.run("kto", continued.name, f"{RANKS} --sequence_parallel_size 2 --load_checkpoint")
    found, expected = metrics_of(continued), metrics_of(alone)
    assert found.keys() == expected.keys()
    for step, metrics in found.items():
        assert metrics == pytest.approx(expected[step], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("command", OPTIONS)
def test_held_out_rows_are_told_apart(place, command):
    last = metrics_of(place.whole(command))[STEPS]
    assert last["eval/accuracy"] > 0.9
    assert last["eval/chosen_reward"] > last["eval/rejected_reward"]


@pytest.mark.parametrize("command", OPTIONS)
def test_two_ranks_take_the_steps_of_one(place, command):
    together = metrics_of(place.whole(command))
    alone = metrics_of(place.alone(command))
    for step in (1, 2, 3):
        assert together[step] == pytest.approx(alone[step], rel=1e-3, abs=1e-4)


def test_a_partitioned_reference_moves_like_a_whole_one(place):
    partitioned = metrics_of(place.run("dpo", "dpo_partitioned", f"{OPTIONS['dpo']} {RANKS} --zero_stage 3"))
    whole = metrics_of(place.whole("dpo"))
    for step in (1, 3, 5):
        assert partitioned[step] == pytest.approx(whole[step], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("command", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_reference_log_probabilities_are_kept_for_other_runs(place, command):
    asked = metrics_of(place.run(command, f"{command}_asked"))
    first = metrics_of(place.run(command, f"{command}_first", "--precompute_ref_log_probs"))
    kept = sorted((place.folder / "cache" / "rlhf-cli" / "reference").iterdir())
    again = metrics_of(place.run(command, f"{command}_again", "--precompute_ref_log_probs"))
    assert len(kept) >= 2  # training and evaluation data
    assert sorted((place.folder / "cache" / "rlhf-cli" / "reference").iterdir()) == kept
    assert again == first
    assert first[1] == pytest.approx(asked[1], rel=1e-4, abs=1e-5)


def test_transformers_loads_the_reward_model_with_its_statistics(place):
    folder = place.whole("rm") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    last = metrics_of(place.whole("rm"))[STEPS]
    assert model.config.num_labels == 1
    assert model.config.reward_mean == pytest.approx(last["eval/reward"])
    assert model.config.reward_std == pytest.approx(last["eval/reward_std"])

    scores = []
    for response in ("46", "no idea"):
        chat = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        tokens = tokenizer(text.strip(), add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(tokens).logits.item())
    assert scores[0] > scores[1]


def test_a_finished_reward_model_that_is_continued_keeps_its_statistics(place):
    run, more = place.alone("rm"), f"--save_steps {STEPS - 2} --load_checkpoint"
    config = run / "model" / "config.json"
    before = config.read_text()
    assert json.loads(before)["reward_std"] > 0
    place.run("rm", run.name, more)
    assert config.read_text() == before
    words = place.words("rm", run.name, f"{more} --l2 0.1")
    output = run_rlhf(*words, status=2, environment=place.caches)
    assert "belongs to another run: its l2 is 0.0, not 0.1" in " ".join(output.split())


def test_what_cannot_be_trained_is_refused_before_anything_is_written(place):
    three = place.folder / "three"
    AutoModelForSequenceClassification.from_pretrained(place.folder / "tiny", num_labels=3).save_pretrained(three)
    AutoTokenizer.from_pretrained(place.folder / "tiny").save_pretrained(three)
    data = f"--dataset {place.folder / 'pairs_train.jsonl'} --output {place.folder / 'refused'}"
    for words, fault in {
        f"rm --pretrain {three}": f"--pretrain '{three}' has 3 labels, but a reward model has one",
        f"dpo --pretrain {place.folder / 'tiny'} --compile_model --zero_stage 3": "compile_model cannot be combined",
    }.items():
        output = run_rlhf(*words.split(), *data.split(), status=2)
        assert fault in " ".join(output.split())
        assert not (place.folder / "refused").exists()
