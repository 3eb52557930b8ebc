"""Tokenizers that transformers rebuilds by class are compared with tokenizer.json on the text of the rows."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from rlhf_cli.config.data import DataConfig, PromptConfig, TemplateConfig
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError

TEXT = "In 2023, 650841823 people"
PLAIN = TemplateConfig(apply_chat_template=False)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Return a folder with a byte-level tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_of(folder, name):
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(str(folder))


def rows(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "people", "response": text}) + "\n")
    return str(path)


def load(tmp_path, tokenizer, text=TEXT):
    path = rows(tmp_path, text)
    config = DataConfig(dataset=path)
    return SEQUENCES.load(config, tokenizer, dataset=path, split="train", seed=0, template=PLAIN)


def test_a_class_that_loses_text_is_refused_with_the_cure(byte_level, tmp_path) -> None:
    tokenizer = tokenizer_of(byte_level, "LlamaTokenizer")
    with pytest.raises(UsageError, match=r"reads 'In 2023, 650841823 people' as 'In2023,650841823people': .*LlamaT"):
        load(tmp_path, tokenizer)
    config = PromptConfig(prompt_data=rows(tmp_path, "A"), input_key="response")
    load_prompts(config, tokenizer, max_new_tokens=4, seed=0, template=PLAIN)  # text without spaces is not changed
    config = PromptConfig(prompt_data=rows(tmp_path, TEXT), input_key="response")
    with pytest.raises(UsageError, match=r'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json'):
        load_prompts(config, tokenizer_of(byte_level, "LlamaTokenizer"), max_new_tokens=4, seed=0, template=PLAIN)


def test_other_ids_of_the_same_text_are_a_warning(byte_level, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, tokenizer_of(byte_level, "Qwen2Tokenizer"))
    (record,) = caplog.records
    assert "transformers builds it as Qwen2Tokenizer" in record.getMessage()


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_equal_tokens_say_nothing(name, byte_level, tmp_path, caplog) -> None:
    tokenizer = tokenizer_of(byte_level, name)
    tokenizer.add_tokens(["<extra>"])  # is not in the file
    with caplog.at_level(logging.WARNING):
        load(tmp_path, tokenizer, f"{TEXT} <extra> people")
    assert not caplog.records
