"""Tokenizers without a fast backend work for sampling; training on data is rejected with the reason."""

import io
import json

import pytest
import sentencepiece
from chat_tokenizers import CHATML, make_tokenizer
from transformers import ByT5Tokenizer, GPTSw3Tokenizer, PreTrainedTokenizerBase, TokenizersBackend

from rlhf_cli.backends.rollout.stop_strings import StopStrings
from rlhf_cli.config.data import DataConfig, PromptConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser
from rlhf_cli.errors import UsageError
from rlhf_cli.models.identity import tokenizer_fingerprint
from rlhf_cli.models.tokenizers import read_tokenizer

TEXTS = ["What is the capital of France? Paris. Rome.", "user assistant one two three four five"] * 50


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> PreTrainedTokenizerBase:
    """Return GPT-SW3's tokenizer class, which uses the SentencePiece library from Python."""
    folder, model = tmp_path_factory.mktemp("pieces"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        eos_piece="<|endoftext|>",
        user_defined_symbols=["<|javascript|>"],
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    made = GPTSw3Tokenizer(str(folder / "spiece.model"), chat_template=CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.save_pretrained(folder)
    return read_tokenizer(str(folder), ModelSource(pretrain=str(folder)))


@pytest.fixture(scope="module")
def bytes_in_python() -> PreTrainedTokenizerBase:
    made = ByT5Tokenizer(chat_template=CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


@pytest.fixture(params=["sentence_piece", "bytes_in_python"])
def slow(request) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(request.param)
    assert not tokenizer.is_fast
    assert not hasattr(tokenizer, "backend_tokenizer")
    return tokenizer


def test_prompts_of_a_slow_tokenizer_are_the_tokens_that_it_makes(slow, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "What is the capital?"}) + "\n")
    (prompt,) = load_prompts(PromptConfig(prompt_data=str(path)), slow, max_new_tokens=9, seed=0).prompts
    expected = "<|im_start|>user\nWhat is the capital?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == expected
    assert prompt.prompt_ids == slow(expected, add_special_tokens=False)["input_ids"]
    assert prompt.prompt_ids.count(slow.convert_tokens_to_ids("<|im_start|>")) == 2


def test_plain_prompts_of_a_slow_tokenizer_begin_as_its_own_texts_do(slow):
    (ids,) = Tokeniser(slow).prompts(["What is"], plain=True)
    whole = slow("What is")["input_ids"]
    assert ids == (whole[:-1] if whole[-1] == slow.eos_token_id else whole)


def test_stop_strings_are_found_in_the_tokens_of_a_slow_tokenizer(slow):
    token_ids = slow("What is the capital of France? Paris. Rome.", add_special_tokens=False)["input_ids"]
    stop = StopStrings(slow, ("France?",))
    (end,) = [n for n in range(1, len(token_ids) + 1) if stop.end(token_ids[:n])][:1]
    assert slow.decode(token_ids[:end]).strip() == "What is the capital of France?"


def test_a_sampled_token_that_only_the_model_has_leaves_the_text_of_the_others(slow):
    token_ids = slow("What is", add_special_tokens=False)["input_ids"]
    beyond = [*token_ids, len(slow) + 3, *token_ids]
    text = text_of(slow, beyond, skip_special_tokens=True)
    assert text == slow.decode([*token_ids, *token_ids], skip_special_tokens=True)
    assert StopStrings(slow, ("What is",)).end(beyond)


def test_training_on_data_with_a_slow_tokenizer_is_refused_with_its_class_and_the_cure(slow, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "What?", "response": "Paris."}) + "\n")
    with pytest.raises(UsageError, match=rf"{type(slow).__name__} is a slow one.*no offsets.*tokenizer\.json"):
        SEQUENCES.load(DataConfig(dataset=str(path)), slow, dataset=str(path), split="train", seed=0)


def test_slow_tokenizers_with_other_words_have_other_fingerprints(sentence_piece, bytes_in_python):
    assert tokenizer_fingerprint(sentence_piece) != tokenizer_fingerprint(bytes_in_python)


def test_of_a_mistral_folder_the_fast_tokenizer_with_the_template_is_read_not_mistrals_own(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    )
    (tmp_path / "tekken.json").write_text(json.dumps({"vocab": [], "config": {}}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]  # Mistral's folders derive the class from the model type
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_tokenizer(str(tmp_path), ModelSource(pretrain=str(tmp_path)))
    assert isinstance(tokenizer, TokenizersBackend)
    assert tokenizer.chat_template == CHATML
