"""Tokenised data is reused between runs, rebuilt after any change, and never used when damaged."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, LLAMA_3, make_tokenizer

from rlhf_cli.config.data import DataConfig, LabelledDataConfig, PreferenceDataConfig, TemplateConfig
from rlhf_cli.data import cache
from rlhf_cli.data.preference_data import PAIRS, RESPONSES
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError

ROWS = [{"prompt": f"What is {i}?", "answer": f"{i} " * (i % 7 + 1)} for i in range(30)]
PAIR_ROWS = [{"prompt": f"What is {i}?", "chosen": f"{i}!", "rejected": "no", "margin": i or None} for i in range(30)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Loading:
    """Loads rows.jsonl with a cache; `made` counts the rows that were tokenised instead of reused."""

    def __init__(self, folder, rows=ROWS):
        self.kept, self.dataset = folder / "kept", write(folder / "rows.jsonl", rows)
        self.made = 0

    def __call__(self, tokenizer=None, *, seed=0, system_prompt=None, **settings):
        config = DataConfig(**{"dataset": self.dataset, "data_cache": str(self.kept), **settings})
        return self.run(SEQUENCES.load, config, tokenizer, seed, TemplateConfig(system_prompt=system_prompt))

    def run(self, load, config, tokenizer=None, seed=0, template=None):
        self.made = 0

        def progress(done, total):
            self.made = done

        tokenizer = tokenizer or make_tokenizer(CHATML)
        return load(
            config,
            tokenizer,
            dataset=config.dataset,
            split="train",
            seed=seed,
            template=template or TemplateConfig(),
            progress=progress,
        )

    @property
    def files(self):
        return sorted(path for path in self.kept.iterdir() if path.suffix == ".arrow")


def content(data):
    return [(sequence.token_ids.tolist(), sequence.loss_mask.tolist()) for sequence in data.items]


@pytest.fixture
def load(tmp_path):
    return Loading(tmp_path)


def test_second_run_finds_the_same_sequences_and_says_the_same(load):
    first = load(max_len=24)
    assert load.made == 30
    second = load(max_len=24)
    assert load.made == 0
    assert content(first) == content(second)
    assert first.columns["length"].tolist() == second.columns["length"].tolist()
    assert first.columns["num_trained"].tolist() == second.columns["num_trained"].tolist()
    assert first.report == second.report
    assert "truncated" in second.report.summary


def test_pairs_and_labelled_responses_are_kept_too(tmp_path):
    load = Loading(tmp_path, PAIR_ROWS)
    settings = {"dataset": load.dataset, "data_cache": str(load.kept)}
    first, second = (load.run(PAIRS.load, PreferenceDataConfig(**settings)) for _ in range(2))
    assert load.made == 0
    assert [str(pair) for pair in first.items] == [str(pair) for pair in second.items]
    assert [pair.margin for pair in second.items][:3] == [None, 1.0, 2.0]
    assert first.report == second.report
    first, second = (load.run(RESPONSES.load, LabelledDataConfig(**settings)) for _ in range(2))
    assert load.made == 0
    assert [str(item) for item in first.items] == [str(item) for item in second.items]
    assert second.columns["desirable"].tolist() == [True, False] * 30


def test_changed_file_is_prepared_anew_though_size_and_time_are_the_same(load):
    load()
    before = os.stat(load.dataset)
    changed = [row | {"prompt": row["prompt"].replace("3?", "4?")} for row in ROWS]
    write(Path(load.dataset), changed)
    assert os.stat(load.dataset).st_size == before.st_size
    os.utime(load.dataset, ns=(before.st_atime_ns, before.st_mtime_ns))
    load()
    assert load.made == 30


def test_moved_file_is_found_and_named_by_its_new_path(load, tmp_path):
    load()
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    load.dataset = str(tmp_path / "moved.jsonl")
    data = load()
    assert load.made == 0
    assert data.report.summary.startswith(f"{tmp_path}/moved.jsonl (")


CHANGES: dict[str, dict[str, Any]] = {
    "max_len": {"max_len": 20},
    "overlong": {"overlong": "drop"},
    "pretrain_mode": {"pretrain_mode": True},
    "system_prompt": {"system_prompt": "be brief"},
    "max_samples": {"max_samples": 29},
    "template": {"tokenizer": make_tokenizer(LLAMA_3)},
    "tokens": {"tokenizer": make_tokenizer(CHATML, adds_bos=True)},
    "seed of a mixture": {"dataset_probs": "0.5,0.5", "seed": 2},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_matters_makes_another_file(name, load, tmp_path):
    if "dataset_probs" in CHANGES[name]:
        load.dataset = f"{load.dataset},{write(tmp_path / 'more.jsonl', ROWS)}"
        load(dataset_probs="0.5,0.5", seed=1)
    else:
        load()
    load(**CHANGES[name])
    assert load.made > 0
    assert len(load.files) == 2


def test_what_does_not_matter_makes_no_other_file(load):
    load(seed=1)
    load(seed=2, dataset_split="test", eval_dataset="x", max_samples=500)
    assert load.made == 0


def damaged(content):
    middle = len(content) // 2
    return {
        "cut off": content[:middle],
        "empty": b"",
        "a few bytes": b"xyz",
        "altered": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "altered counts": content.replace(b'"items": 30', b'"items": 31'),
        "something else": b"\0" * len(content),
    }


@pytest.mark.parametrize("name", damaged(b"0" * 9))
def test_damaged_file_is_made_anew(name, load):
    first = content(load())
    (path,) = load.files
    good = path.read_bytes()
    path.unlink()  # the first run still has the file mapped
    path.write_bytes(damaged(good)[name])
    again = load()
    assert load.made == 30
    assert content(again) == first
    assert path.read_bytes() == good


def test_rows_with_faults_are_told_and_nothing_is_kept(load):
    write(load.kept.parent / "rows.jsonl", [*ROWS, {"prompt": "What?", "answer": ""}])
    for _ in range(2):
        with pytest.raises(UsageError, match="line 31: the response is empty"):
            load()
    assert not [path for path in load.kept.iterdir() if path.suffix != ".lock"]


def test_cache_can_be_turned_off(load, tmp_path):
    load(data_cache="off")
    load(data_cache="off")
    assert load.made == 30
    assert not load.kept.exists()


def test_auto_is_the_users_cache_and_leaves_small_sets_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder("auto", cache.AUTO_ROWS) == tmp_path / "xdg" / "rlhf-cli" / "data"
    assert cache.cache_folder("auto", cache.AUTO_ROWS - 1) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder("auto", cache.AUTO_ROWS) == tmp_path / ".cache" / "rlhf-cli" / "data"


def test_folder_that_cannot_be_written_is_named(load, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--data_cache .*/file/kept cannot be written: Not a directory"):
        load(data_cache=str(tmp_path / "file" / "kept"))


def test_users_cache_that_cannot_be_written_is_done_without(load, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "AUTO_ROWS", 1)
    assert len(load(data_cache="auto").items) == 30


def test_files_that_no_run_has_used_for_a_month_are_removed(load):
    load()
    (old,) = load.files
    month_ago = time.time() - 31 * 24 * 3600
    stranger = load.kept / "notes.txt"
    stranger.write_text("mine")
    killed = load.kept / f".{old.name}.{'0' * 16}"
    killed.write_text("half")
    for path in (old, stranger, killed):
        os.utime(path, (month_ago, month_ago))
    load()  # marks the entry as used
    load(max_len=20)
    assert old.exists()
    assert not killed.exists()
    os.utime(old, (month_ago, month_ago))
    load(max_len=21)
    assert not old.exists()
    assert stranger.exists()


def load_in_a_process(dataset, kept, results):
    config = DataConfig(dataset=dataset, data_cache=kept)
    made = []
    data = SEQUENCES.load(
        config,
        make_tokenizer(CHATML),
        dataset=dataset,
        split="train",
        seed=0,
        progress=lambda done, total: made.append(done),
    )
    results.put((len(made), content(data)))


def test_of_several_ranks_one_prepares_and_all_get_the_same(load):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (load.dataset, str(load.kept), results)
    ranks = [context.Process(target=load_in_a_process, args=arguments) for _ in range(2)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert sorted(made for made, _ in found) == [0, 1]
    assert found[0][1] == found[1][1]
    assert len(load.files) == 1
