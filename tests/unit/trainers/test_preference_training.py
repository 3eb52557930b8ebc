"""Reward models, dpo and kto with the real engine: steps do not depend on micro-batches, packing or prefix sharing."""

import json
import math
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from preference_training import (
    STEPS,
    TASKS,
    dpo_task,
    kto_task,
    make_labelled,
    make_pairs,
    make_reference,
    rm_task,
    run_steps,
    without_sharing,
)
from tiny_training import CLOSE, NOISE, Layout, farthest, load_policy
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.preference import PreferenceSettings, preference_loss
from rlhf_cli.algorithms.ragged import segment_sum
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.frozen_reference import kept_columns
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.config.model import ModelConfig, ReferenceConfig
from rlhf_cli.config.preference import LOSS_DEFAULTS
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import MicroBatch, TokenSequence, at_targets, only_end, pack
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import flags_of
from rlhf_cli.models.classifiers import padding_token
from rlhf_cli.models.finding import find_model
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.dpo import make_objective
from rlhf_cli.runs.offline.frozen_reference import check_reference, pair_reference
from rlhf_cli.runs.offline.task import Items
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline import dpo
from rlhf_cli.trainers.offline.kto import KTOPreparation, partners_of
from rlhf_cli.trainers.offline.pairs import PairItems
from rlhf_cli.trainers.offline.reference_logprobs import all_results, digest_of_pairs
from rlhf_cli.trainers.offline.rm import finish_reward_metrics

pytestmark = pytest.mark.usefixtures("group_of_one")


# For log-probs of whole responses, near -100 in float32, and their differences.
ROUNDING = 2e-5


def assert_same_steps(one, other):
    for metrics, expected in zip(one.metrics, other.metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=ROUNDING)
    assert farthest(one.weights, other.weights) < CLOSE


def test_pairs_are_weighted_by_what_the_policy_would_sample_by_hand():
    """Chosen: probabilities 1/2, sums over squares 1/2 and 1/4; rejected: 1/4 and 1/2. w = sqrt(1 * 2) / 2."""
    trees = [make_tree(chosen=(3, 4), rejected=(5,))]
    batch = MicroBatch(pack_trees(trees, share_prompts=False), {dpo.REF: torch.zeros(1, 2)})
    logprobs_K = torch.tensor([0.5, 0.5, 0.25]).log().requires_grad_()
    squares_K = torch.tensor([0.5, 0.25, 0.5]).log()

    def model(pack, *, with_log_squares):
        return logprobs_K, squares_K if with_log_squares else None

    totals, beta = StepTotals(num_tokens=3, num_sequences=1), 0.1
    objective = dpo.DPOObjective(("sigmoid",), (1.0,), PreferenceSettings(beta=beta), use_weighting=True, ld_alpha=0.5)
    loss, metrics = objective(model, batch, totals)
    # The second chosen token counts half: h_c = 1.5 ln (1/2), h_r = ln (1/4).
    expected = -math.sqrt(2) / 2 * logsigmoid(torch.tensor(beta * (1.5 * math.log(0.5) - math.log(0.25))))
    assert loss.item() == pytest.approx(expected.item())
    assert metrics["pair_weight"].item() == pytest.approx(math.sqrt(2) / 2)
    assert metrics["chosen_nll"].item() == pytest.approx(math.log(2))
    (gradient_K,) = torch.autograd.grad(loss, logprobs_K)
    assert (gradient_K[0] / gradient_K[1]).item() == pytest.approx(2.0)
    assert gradient_K[2].item() == pytest.approx(-gradient_K[0].item())


def make_tree(*, chosen: tuple[int, ...], rejected: tuple[int, ...]) -> Tree:
    """Return a pair with these trained tokens after two prompt tokens."""
    parts = [np.array(part, np.int32) for part in (chosen, rejected)]
    return Tree(np.array([1, 2], np.int32), tuple(Continuation(part, np.ones(part.size, bool)) for part in parts))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_micro_batches_do_not_change_a_step(tiny_model_dir, name, stage):
    whole = run_steps(tiny_model_dir, TASKS[name](), stage, Layout())
    assert_same_steps(run_steps(tiny_model_dir, TASKS[name](), stage, Layout(max_sequences=1)), whole)
    assert_same_steps(run_steps(tiny_model_dir, TASKS[name](), stage, Layout(max_tokens=40)), whole)


@pytest.mark.slow  # compiles DeepSpeed's optimizer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["rm", "dpo", "kto"])
def test_an_optimizer_in_host_memory_takes_the_same_steps(tiny_model_dir, name, stage):
    plain = run_steps(tiny_model_dir, TASKS[name](), stage, Layout())
    assert_same_steps(run_steps(tiny_model_dir, TASKS[name](), stage, Layout(), adam_offload=True), plain)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("prm", "kto")])
def test_sharing_prompts_does_not_change_a_step(tiny_model_dir, name):
    task = TASKS[name]()
    plain = without_sharing(task)
    assert plain.items.lengths.sum() > task.items.lengths.sum()
    assert_same_steps(run_steps(tiny_model_dir, plain, 2, Layout()), run_steps(tiny_model_dir, task, 2, Layout()))


@pytest.mark.parametrize("name", TASKS)
def test_every_parameter_moves(tiny_model_dir, name):
    task = TASKS[name]()
    trained = run_steps(tiny_model_dir, task, 2, Layout())
    start = run_steps(tiny_model_dir, task, 2, Layout(), steps=[])
    # Words in no row have embeddings without gradient; the policy's head is tied to its embedding.
    still = [n for n, weight in trained.weights.items() if weight.equal(start.weights[n]) and NOISE not in n]
    assert still == []


def logprob_of(model, prompt, continuation):
    """Return the summed log-probs of the trained tokens of one sequence."""
    tokens = np.concatenate([prompt, continuation.token_ids])
    mask = np.concatenate([np.zeros(len(prompt), dtype=bool), continuation.loss_mask])
    return model(pack([TokenSequence(tokens, mask)]))[0].sum()


def test_dpo_loss_is_that_of_the_paper_by_hand(tiny_model_dir):
    pairs = make_pairs()
    _, policy = load_policy(tiny_model_dir, 0)
    reference = make_reference(tiny_model_dir, 0, seed=5)._module
    losses = []
    for number in STEPS[0]:
        pair = pairs.items[number]
        ratios = [
            logprob_of(policy, pair.prompt_ids, continuation) - logprob_of(reference, pair.prompt_ids, continuation)
            for continuation in (pair.chosen, pair.rejected)
        ]
        losses.append(-logsigmoid(0.1 * (ratios[0] - ratios[1])).item())
    metrics = run_steps(tiny_model_dir, dpo_task("sigmoid"), 2, Layout(), steps=STEPS[:1]).metrics[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin(tiny_model_dir):
    task = dpo_task("sigmoid")
    _, policy = load_policy(tiny_model_dir, 0)
    batch = task.items.collate([0, 1, 2])
    own = torch.stack(
        [logprob_of(policy, p.prompt_ids, b) for p in make_pairs().items[:3] for b in (p.chosen, p.rejected)]
    )
    loss, metrics = task.objective(policy, batch.with_column("ref_logprobs", own.view(3, 2)), StepTotals(1, 3))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["reward_margin"].item() == pytest.approx(0, abs=ROUNDING)


def test_the_first_loss_of_a_model_with_dropout_is_that_of_a_coin(tiny_model_dir, tmp_path):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    first = run_steps(str(model), dpo_task("sigmoid"), 2, Layout(), steps=STEPS[:1], seed=None).metrics[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_reference_columns_give_the_steps_of_a_reference_that_is_asked(tiny_model_dir):
    task = dpo_task("sigmoid")
    frozen = make_reference(tiny_model_dir, 0, seed=5)
    share = Layout(max_tokens=40).share()
    stored = all_results(frozen, dpo.batch_logprobs, task.items, share=share, gather=distributed.gather_rows)
    assert stored.shape == (8, 2)
    brought = replace(task, items=replace(task.items, columns={dpo.REF: stored}), prepare=None)
    assert_same_steps(run_steps(tiny_model_dir, brought, 2, Layout()), run_steps(tiny_model_dir, task, 2, Layout()))


class Asked:
    """Replaces a frozen model: `forward` computes its result from the micro-batch."""

    def infer(self, batches, forward):
        return [forward(None, batch) for batch in batches]


def on_every_rank(num_ranks, call):
    """Return the results of `call(rank, gather)` on ranks that are threads here."""
    given: dict[int, torch.Tensor] = {}
    together = threading.Barrier(num_ranks)

    def run(rank):
        def gather(rows):
            given[rank] = rows
            together.wait(timeout=60)
            return torch.cat([given[other] for other in range(num_ranks)]), 0

        return call(rank, gather)

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(run, range(num_ranks)))


@pytest.mark.parametrize("max_sequences", [None, 1])
def test_ranks_without_an_item_get_the_reference_columns_of_all(max_sequences):
    pairs = make_pairs().items
    items = PairItems(make_pairs(), share_prompts=True, read_ends=False, columns={})
    expected = [[int(b.token_ids[b.loss_mask].sum()) for b in (pair.chosen, pair.rejected)] for pair in pairs]

    def sums(model, batch):
        return segment_sum(batch.pack.targets_K.float(), batch.pack.cu_trained)

    for num_ranks in (1, 3, 11):  # 8 pairs: with 11 ranks, some have none
        for stored in on_every_rank(
            num_ranks,
            lambda rank, gather, num_ranks=num_ranks: all_results(
                Asked(), sums, items, share=Layout(rank, num_ranks, max_sequences=max_sequences).share(), gather=gather
            ),
        ):
            assert stored.tolist() == expected


def model_of(folder):
    source = ModelConfig(pretrain=str(folder), param_dtype="fp32")
    return ModelPlan(source, source, None, find_model(source), load_tokenizer(source))


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_given_reference_is_the_model_that_dpo_compares_with(
    tiny_model_dir, tiny_llama_dir, tmp_path, monkeypatch, precomputed
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ReferenceConfig(ref_pretrain=tiny_llama_dir, precompute_ref_log_probs=precomputed)
    task, deepspeed, model = dpo_task("sigmoid"), DeepSpeedConfig(), model_of(tiny_model_dir)
    check_reference(settings, model, is_needed=True)
    items, reference = pair_reference(
        settings, task.objective, Items(task.items, None), Layout().share(), model=model, deepspeed=deepspeed
    )
    batches = [items.data.collate([2, 5])]
    [batch] = batches if reference.prepare is None else reference.prepare(None, batches)
    _, given = load_policy(tiny_llama_dir, 0)
    pairs = [make_pairs().items[number] for number in (2, 5)]
    expected = torch.stack([logprob_of(given, p.prompt_ids, b) for p in pairs for b in (p.chosen, p.rejected)])
    torch.testing.assert_close(batch.columns[dpo.REF], expected.view(2, 2), atol=1e-4, rtol=1e-5)


def test_a_reference_that_reads_other_tokens_is_refused(tiny_model_dir, tmp_path):
    def refused(folder):
        with pytest.raises(UsageError) as caught:
            check_reference(ReferenceConfig(ref_pretrain=str(folder)), model_of(tiny_model_dir), is_needed=True)
        return str(caught.value)

    assert refused(tmp_path / "nowhere").startswith("--ref_pretrain: pretrain '")
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 259}))
    assert refused(folder).endswith("has 259 embeddings, but the tokenizer has 260 tokens")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForSequenceClassification"]}))
    assert refused(folder).endswith("is Qwen2ForSequenceClassification, which returns scores: use a language model")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "a different vocabulary than the policy and would misread its token IDs: 2 of 260 tokens" in refused(folder)


def test_data_that_differ_in_one_token_have_another_digest():
    task, other = dpo_task("sigmoid"), dpo_task("sigmoid")
    assert digest_of_pairs(task.items) == digest_of_pairs(other.items)
    other.items.data.items[7].rejected.token_ids[-1] += 1
    assert digest_of_pairs(task.items) != digest_of_pairs(other.items)


def test_kto_baseline_is_the_mean_over_the_step_and_not_below_zero(tiny_model_dir):
    data = make_labelled()
    partners = partners_of(data)
    _, policy = load_policy(tiny_model_dir, 0)
    reference = make_reference(tiny_model_dir, 0, seed=5)._module
    ratios = []
    for number in STEPS[0]:
        prompt, continuation = data.items[number].prompt_ids, data.items[partners[number]].response
        ratios.append((logprob_of(policy, prompt, continuation) - logprob_of(reference, prompt, continuation)).item())
    for layout in (Layout(), Layout(max_sequences=1)):
        metrics = run_steps(tiny_model_dir, kto_task(), 2, layout, steps=STEPS[:1]).metrics[0]
        assert metrics["kl_baseline"] == pytest.approx(max(0.0, np.mean(ratios)), rel=1e-4, abs=ROUNDING)


def test_partners_are_other_items_with_other_prompts():
    data = make_labelled(20)
    for number, prompt in ((3, 4), (4, 4), (13, 4)):
        data.items[number] = data.items[prompt]  # type: ignore[index]
    partners = partners_of(data)
    for number, partner in enumerate(partners):
        assert not np.array_equal(data.items[number].prompt_ids, data.items[partner].prompt_ids)


def test_a_kto_micro_batch_keeps_to_its_bound_with_either_response():
    task = kto_task()
    for number, length in enumerate(task.items.lengths):
        batch = task.items.collate([number])
        assert max(batch.pack.input_ids_T.numel(), batch.mismatched.input_ids_T.numel()) == length


def test_unpaired_apo_asks_for_no_baseline(tiny_model_dir):
    task = kto_task("apo_zero_unpaired")
    assert task.prepare is not None
    assert isinstance(task.prepare(make_reference(tiny_model_dir, 0, 5), distributed.gather_rows), KTOPreparation)
    metrics = run_steps(tiny_model_dir, task, 2, Layout(), steps=STEPS[:1]).metrics[0]
    assert metrics["kl_baseline"] == 0.0


def test_a_reward_model_scores_as_transformers_does(tiny_model_dir, tmp_path):
    model = load_value_backbone(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pairs = make_pairs().items
    trees = [Tree(pair.prompt_ids, (pair.chosen, pair.rejected)) for pair in pairs]
    scores = ValueModel(model)(pack_trees(trees, share_prompts=True, read_ends=True))
    expected = [
        plain(
            torch.from_numpy(np.concatenate([tree.prompt_ids, continuation.token_ids]).astype(np.int64))[None]
        ).logits.item()
        for tree in trees
        for continuation in tree.continuations
    ]
    torch.testing.assert_close(scores.detach(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def ends_turns(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token


def is_none(tokenizer):
    tokenizer.pad_token = None


def is_written_by_the_template(tokenizer):
    tokenizer.chat_template += "{# <|endoftext|> #}"


@pytest.mark.parametrize(
    ("change", "padding"),
    [(ends_turns, "<|endoftext|>"), (is_none, "<|endoftext|>"), (is_written_by_the_template, "<|pad|>")],
)
def test_a_saved_reward_model_scores_padded_batches_as_it_was_trained(tiny_model_dir, tmp_path, change, padding):
    model = load_value_backbone(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))
    tokenizer = make_tiny_tokenizer()
    change(tokenizer)
    model.config.pad_token_id = tokenizer.pad_token_id
    texts = ["2+2=4<|im_end|>", "the sum of two and two is five<|im_end|>"]
    rows = [np.array(tokenizer(text).input_ids, dtype=np.int32) for text in texts]
    ends = [only_end(TokenSequence(row, np.zeros(len(row), dtype=bool))) for row in rows]
    scores = ValueModel(model)(at_targets(pack(ends))).detach()
    save_hf(model, tokenizer, tmp_path / "reward")

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32).eval()
    for side in ("right", "left"):
        theirs = AutoTokenizer.from_pretrained(tmp_path / "reward", padding_side=side)
        assert theirs.pad_token == padding
        with torch.no_grad():
            found = plain(**theirs(texts, padding=True, return_tensors="pt")).logits[:, 0]
        torch.testing.assert_close(found, scores, atol=1e-5, rtol=1e-5)


def test_padding_is_a_named_token_before_another_and_never_one_without_an_embedding():
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|right_pad|>"]})  # 260, 261
    assert padding_token(tokenizer, Qwen2Config(vocab_size=262)) == "<|right_pad|>"
    assert padding_token(tokenizer, Qwen2Config(vocab_size=261)) == "<|reserved_0|>"
    assert padding_token(tokenizer, Qwen2Config(vocab_size=262, eos_token_id=[257, 261])) == "<|reserved_0|>"
    assert padding_token(tokenizer, Qwen2Config(vocab_size=260)) == "<|endoftext|>"
    tokenizer.eos_token = "<|endoftext|>"
    assert padding_token(tokenizer, Qwen2Config(vocab_size=260)) is None


def test_reward_metrics_are_mean_and_spread_of_all_scores(tiny_model_dir):
    trained = run_steps(tiny_model_dir, rm_task(), 2, Layout(max_sequences=2), steps=STEPS[:1])
    model = load_value_backbone(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))
    trees = [Tree(p.prompt_ids, (p.chosen, p.rejected)) for p in make_pairs().items[:5]]
    scores = ValueModel(model)(pack_trees(trees, share_prompts=False, read_ends=True)).detach()
    metrics = finish_reward_metrics(trained.metrics[0])
    assert metrics["reward"] == pytest.approx(scores.mean().item(), rel=1e-4)
    assert metrics["reward_std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(-logsigmoid(scores[0::2] - scores[1::2]).mean().item(), rel=1e-5)


def test_every_loss_with_defaults_of_its_own_reads_those_settings():
    for name, defaults in LOSS_DEFAULTS.items():
        assert defaults.keys() <= preference_loss(name).settings


@pytest.mark.parametrize(
    ("given", "beta", "gamma"),
    [
        ({}, 0.1, 0.5),
        ({"loss": "simpo"}, 2.0, 1.0),
        ({"loss": ["simpo"]}, 2.0, 1.0),
        ({"loss": "simpo", "beta": "2.5"}, 2.5, 1.0),
        ({"loss": "simpo", "beta": "0.1", "simpo_gamma": "0.5"}, 0.1, 0.5),
        ({"loss": "sigmoid_norm"}, 5.0, 0.5),
        ({"loss": "ipo"}, 0.1, 0.5),
        ({"loss": "sigmoid,bco_pair"}, 0.1, 0.5),
    ],
    ids=str,
)
def test_a_loss_alone_has_the_settings_of_its_paper_and_given_ones_win(given, beta, gamma):
    config = build_config(DPOConfig, {"pretrain": "x", "dataset": "x", "output": "x"} | given)
    assert (config.preference.beta, config.preference.simpo_gamma) == (beta, gamma)
    objective = make_objective(config.preference)
    assert (objective.settings.beta, objective.settings.simpo_gamma) == (beta, gamma)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss": "sigmoid,bco_pair", "f_divergence_type": "forward_kl"},
            "f_divergence_type does not support loss bco_p",
        ),
        ({"loss": "aot", "use_weighting": True}, "use_weighting does not support loss aot"),
        ({"loss": "simpo", "use_weighting": True}, "use_weighting does not support loss simpo"),
        ({"loss": "orpo", "ld_alpha": "0.5"}, "ld_alpha does not support loss orpo"),
        ({"f_alpha_divergence_coef": "0.2"}, "f_alpha_divergence_coef needs --f_divergence_type alpha_divergence"),
    ],
    ids=str,
)
def test_an_option_that_a_loss_does_not_support_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        build_config(DPOConfig, {"pretrain": "x", "dataset": "x", "output": "x"} | given)


@pytest.mark.parametrize("name", LOSS_DEFAULTS)
def test_the_help_names_the_settings_of_the_papers(name):
    said = flags_of(DPOConfig)["beta"].help
    assert re.search(rf"{name}( and \w+)? {LOSS_DEFAULTS[name]['beta']:g}\b", said)


def test_what_a_reference_said_is_found_again_whatever_its_path(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(tiny_model_dir)
    of_the_run = kept_columns(ModelConfig(pretrain=str(run)), "rows", lambda: {"ref": np.arange(3.0)})
    again = kept_columns(ModelConfig(pretrain=tiny_model_dir), "rows", lambda: pytest.fail("it was kept"))
    assert again["ref"].tolist() == of_the_run["ref"].tolist() == [0, 1, 2]
    others = kept_columns(ModelConfig(pretrain=tiny_model_dir), "other rows", lambda: {"ref": np.zeros(1)})
    assert others["ref"].tolist() == [0]


@pytest.mark.parametrize("damaged", [lambda whole: whole[:-40], lambda whole: b"", lambda whole: b"text"])
def test_what_a_reference_said_is_asked_again_where_its_file_is_damaged(tiny_model_dir, tmp_path, monkeypatch, damaged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = ModelConfig(pretrain=tiny_model_dir)
    kept_columns(source, "rows", lambda: {"ref": np.arange(3.0)})
    [file] = tmp_path.rglob("*.npz")
    file.write_bytes(damaged(file.read_bytes()))
    assert kept_columns(source, "rows", lambda: {"ref": np.ones(2)})["ref"].tolist() == [1, 1]
    assert kept_columns(source, "rows", lambda: pytest.fail("it was kept"))["ref"].tolist() == [1, 1]


def test_what_a_reference_said_is_used_where_it_cannot_be_kept(tiny_model_dir, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder can be made in a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    columns = kept_columns(ModelConfig(pretrain=tiny_model_dir), "rows", lambda: {"ref": np.arange(3.0)})
    assert columns["ref"].tolist() == [0, 1, 2]
