"""`rlhf data --contamination` names the benchmark prompts in a command's data, and fails if there are any."""

import json
from pathlib import Path

import pytest
from chat_tokenizers import CHATML, make_tokenizer

from rlhf_cli import cli

LONG = "If a train leaves at noon and travels sixty miles in one hour how far does it go in three hours"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(CHATML).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, *rows: dict[str, object]) -> None:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def test_the_table_lists_overlaps_and_the_exit_status_is_one(write, model, capfd) -> None:
    write("train.jsonl", {"prompt": "What is 2?", "response": "2"}, {"prompt": f"{LONG}?", "response": "180"})
    write("bench.jsonl", {"question": "Name a prime.", "answer": "7"}, {"question": LONG, "answer": "180"})
    write("clean.jsonl", {"problem": "Name a prime.", "answer": "7"})
    words = ["data", "train.jsonl", "--for", "sft", "--pretrain", model, "--contamination"]
    assert cli.main([*words, "bench.jsonl,clean.jsonl"]) == 1
    out, err = capfd.readouterr()
    assert [line.split() for line in out.splitlines()[:4]] == [
        ["Benchmark", "prompts", "in", "2", "rows"],
        ["benchmark", "prompts", "overlap", "share", "unchecked"],
        ["bench.jsonl", "2", "1", "50.0%", "0"],
        ["clean.jsonl", "1", "0", "0.0%", "0"],
    ]
    assert 'bench.jsonl line 2: 100% in train.jsonl line 2: "if a train leaves at noon' in out
    assert "1 of 3 benchmark prompts overlap with the data" in err
    assert cli.main([*words, "clean.jsonl"]) == 0
    assert "no overlap found" in capfd.readouterr().out


def test_json_lists_all_overlaps_of_prompts_in_messages(write, model, capfd) -> None:
    write("train.jsonl", {"prompt": [{"role": "user", "content": f"{LONG}? Think."}], "reward_model": {"x": "180"}})
    write("bench.jsonl", {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]})
    words = ["data", "train.jsonl", "--for", "grpo", "--pretrain", model, "--contamination", "bench.jsonl", "--json"]
    assert cli.main(words) == 1
    found = json.loads(capfd.readouterr().out)
    assert found == {
        "rows": 1,
        "benchmarks": [{"name": "bench.jsonl", "prompts": 1, "overlap": 1, "unchecked": 0}],
        "overlaps": [
            {
                "benchmark": "bench.jsonl",
                "prompt": "bench.jsonl line 1",
                "row": "train.jsonl line 1",
                "rows": 1,
                "share": 1.0,
                "shared": LONG.lower(),
            }
        ],
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contamination", "missing.jsonl"], "--contamination: no file 'missing.jsonl'"),
        (["--contamination", "no_prompt.jsonl"], "--contamination: no_prompt.jsonl"),
        (["--contamination", "train.jsonl", "--rewards"], "separate tests: set only one"),
        (["--json"], "set --rewards or --contamination"),
    ],
)
def test_bad_benchmarks_are_one_sentence(write, model, capfd, flags, message) -> None:
    write("train.jsonl", {"prompt": "What is 2?", "answer": "2"})
    write("no_prompt.jsonl", {"foo": 1})
    assert cli.main(["data", "train.jsonl", "--for", "grpo", "--pretrain", model, *flags]) == 2
    assert message in capfd.readouterr().err
