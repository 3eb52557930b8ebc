"""Tiny models with tokenizers, created locally without downloads."""

import functools
import gc
import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import run_rlhf


def pytest_configure() -> None:
    """Disable cyclic garbage collection during the import of a thousand modules, which are never freed."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection, excluding the modules and tests loaded so far."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Collect garbage once: DeepSpeed does so a dozen times per engine, over everything that earlier engines left."""
    if "group_of_one" in getattr(item, "fixturenames", ()):
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Retry a failed end-to-end test once, with new folders.

    These tests stop and kill real processes at specific moments, which a stalled machine can miss. The summary lists
    retried tests as `RERUN`; a test that appears twice needs fixing.
    """
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def _own_calibration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the runs of tests out of the developer's calibration file; started commands inherit the variable."""
    os.environ["RLHF_CALIBRATION"] = str(tmp_path_factory.mktemp("calibration") / "calibration.jsonl")


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer():
    """Create a byte-level tokenizer with 260 tokens: 256 bytes, <|endoftext|> (pad), <|im_start|>, <|im_end|> (end),
    one merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "th"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(model, tokenizer, folder: Path) -> str:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _shape(tokenizer) -> dict[str, object]:
    return {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with a random float32 2-layer Qwen2 with tied embeddings and grouped heads, tokenizer and chat
    template.
    """
    return save_tiny_model(tmp_path_factory.mktemp("tiny-qwen2"))


def save_tiny_model(folder: Path) -> str:
    """Write the model of `tiny_model_dir`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**_shape(tokenizer), tie_word_embeddings=True))
    return _save(model, tokenizer, folder)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with a random float32 2-layer Llama with untied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_shape(tokenizer), tie_word_embeddings=False))
    return _save(model, tokenizer, tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with a random float32 2-layer Qwen3-MoE with 4 experts per layer, 2 of them active."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(2)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    shape = _shape(tokenizer) | {"head_dim": 32}  # vLLM's CPU kernels require multiples of 32
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False))
    return _save(model, tokenizer, tmp_path_factory.mktemp("tiny-qwen3-moe"))


@pytest.fixture(scope="session")
def tiny_hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Create a folder with a random float32 model of a type with convolutions or recurrent layers."""
    import torch
    from tiny_causal_models import tiny_config
    from transformers import AutoModelForCausalLM

    tokenizer = make_tiny_tokenizer()

    @functools.cache
    def create(kind: str) -> str:
        config = tiny_config(kind)
        config.vocab_size = config.vocab_size_per_layer_input = 300
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return _save(model, tokenizer, tmp_path_factory.mktemp(f"tiny-{kind}"))

    return create


@pytest.fixture(scope="session")
def environment_of_one_rank() -> Iterator[dict[str, str]]:
    """Environment of a process group with only this process.

    Shared by all modules: DeepSpeed keeps its groups forever, and would not know a second process group.
    """
    from rlhf_cli.backends.training import distributed

    before = dict(os.environ)
    distributed.join_process_group()
    joined = dict(os.environ)
    _set_environment(before)
    yield joined
    distributed.leave_process_group()


@pytest.fixture(scope="module")
def group_of_one(environment_of_one_rank: dict[str, str]) -> Iterator[None]:
    """Process group of this process. The environment is restored afterwards, so that it does not look like a rank's."""
    before = dict(os.environ)
    _set_environment(environment_of_one_rank)
    yield
    _set_environment(before)


def _set_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


@pytest.fixture(scope="session")
def problems(tmp_path_factory) -> Path:
    """Sixteen additions with sums, for end-to-end tests of online commands."""
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 14) for b in range(10, 14)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory, problems) -> Path:
    """An untrained 0.1M-parameter model with the tokens of `problems`, created by `rlhf scratch`."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
    run_rlhf("scratch", "--dataset", problems, *size.split(), "--output", path)
    return path


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Folder for a cluster's files: pytest's folders exceed the 107 bytes of a Unix socket path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a reward file and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    from rlhf_cli.backends.rollout.processes import process_tree

    yield
    assert not process_tree(os.getpid())
