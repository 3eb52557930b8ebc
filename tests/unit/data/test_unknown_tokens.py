"""Tokens that a tokenizer has and its model does not are rejected with their row before a run starts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf_cli import cli
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config

EMBEDDINGS = 300
KNOWN, UNKNOWN = "<new0>", "<new49>"
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": UNKNOWN}],
    "dpo": [PAIR, PAIR | {"rejected": f"3 {UNKNOWN}"}],
    "rm": [PAIR, PAIR | {"prompt": UNKNOWN}],
    "kto": [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "1+1=", "completion": UNKNOWN, "label": False},
    ],
    "grpo": [{"prompt": "1+1=", "answer": "2"}, {"prompt": UNKNOWN, "answer": "2"}],
    "generate": [{"prompt": "1+1="}, {"prompt": UNKNOWN}],
}
ONLINE = ("grpo", "generate")


@pytest.fixture(scope="module")
def model(tiny_model_dir, tmp_path_factory) -> Path:
    """Save a model with 300 embeddings and a larger tokenizer."""
    folder = tmp_path_factory.mktemp("more-tokens") / "model"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new{number}>" for number in range(50)])
    assert tokenizer.convert_tokens_to_ids(KNOWN) < EMBEDDINGS <= tokenizer.convert_tokens_to_ids(UNKNOWN)
    tokenizer.save_pretrained(folder)
    return folder


def call(command: str, model: Path, tmp_path: Path, rows: list[dict], **more: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = cli.COMMANDS[command]
    given: dict[str, Any] = {"pretrain": str(model), "output": str(tmp_path / "run")}
    if command in ONLINE:
        given |= {"prompt_data": str(path), "apply_chat_template": False, "rollout_backend": "transformers"}
        given |= {"max_len": 64, "max_new_tokens": 8}
    else:
        given |= {"dataset": str(path), "data_cache": str(tmp_path / "cache")}
    if command == "grpo":
        given |= {"reward_funcs": "exact", "label_key": "answer", "rollout_batch_size": 2, "train_batch_size": 16}
    entry.run(build_config(entry.config_class, given | more))


@pytest.mark.parametrize("command", ROWS)
def test_a_token_without_an_embedding_is_named_with_its_row(command, model, tmp_path):
    message = f"rows.jsonl line 2: the token '{UNKNOWN}' has the id 309, and pretrain '{model}' has 300 embeddings"
    with pytest.raises(UsageError, match=re.escape(message)):
        call(command, model, tmp_path, ROWS[command])
    assert not (tmp_path / "run").exists()


def test_held_out_rows_are_looked_at_too(model, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(ROWS["sft"][1]) + "\n")
    with pytest.raises(UsageError, match=r"held_out\.jsonl line 1: the token"):
        call("sft", model, tmp_path, ROWS["sft"][:1], eval_dataset=str(held_out), eval_steps=1)
