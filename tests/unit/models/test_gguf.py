"""GGUF files as models: contents of the converted folder, and rejected files."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import find_model, resolve_model_path
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.tokenizers import load_tokenizer

QUANTISED = gguf.GGMLQuantizationType.Q8_0
OF_A_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"
    return f"blk.{parts[2]}.{OF_A_LAYER['.'.join(parts[3:-1])]}.{parts[-1]}"


def write_gguf(folder: str, file: Path, *, quantise: bool) -> dict[str, torch.Tensor]:
    """Write the folder's Qwen2 as a GGUF file and return its dequantised weights.

    Matrices whose rows are multiples of blocks of 32 are quantised to 8 bits.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    tokens = [token for token, _ in vocabulary]
    controls = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in controls else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    stored = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if quantise and values.ndim == 2 and values.shape[1] % 32 == 0:
            blocks = gguf.quantize(values, QUANTISED)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=QUANTISED)
            values = gguf.dequantize(blocks, QUANTISED)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
        stored[name] = torch.tensor(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf-cli" / "gguf"


@pytest.mark.parametrize("quantise", [True, False])
def test_a_file_is_read_as_the_model_that_is_in_it(quantise, tiny_model_dir, cache, tmp_path, capsys):
    file = tmp_path / "tiny.gguf"
    stored = write_gguf(tiny_model_dir, file, quantise=quantise)
    config = ModelConfig(pretrain=str(file), param_dtype="fp32")
    model, tokenizer = load_causal_lm(config), load_tokenizer(config)
    for name, parameter in model.named_parameters():
        expected = stored[name].bfloat16().float() if quantise else stored[name]
        assert torch.equal(parameter, expected), name
    known = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokenizer("the <|im_end|>").input_ids == known("the <|im_end|>").input_ids
    assert (tokenizer.chat_template, tokenizer.eos_token) == (known.chat_template, known.eos_token)
    assert model.generation_config.eos_token_id == known.eos_token_id
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    done = "weights dequantized from Q8_0 to bf16" if quantise else "F32 weights converted"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tiny.gguf: ")]
    assert len(lines) == 1
    assert done in lines[0]
    assert lines[0].endswith(f", in {folder}")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_folder_with_one_file_stands_for_it_and_is_converted_once(tiny_model_dir, cache, tmp_path):
    file = tmp_path / "model" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(tiny_model_dir, file, quantise=True)
    (file.parent / "config.json").write_text("{}")  # some published models include such a file
    folder = resolve_model_path(str(file.parent))
    made = (Path(folder) / "config.json").stat().st_mtime_ns
    assert resolve_model_path(str(file)) == folder
    assert (Path(folder) / "config.json").stat().st_mtime_ns == made
    write_gguf(tiny_model_dir, file, quantise=False)
    assert resolve_model_path(str(file)) != folder


def test_weights_of_another_form_in_the_folder_come_first(tiny_model_dir, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in Path(tiny_model_dir).iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (
            {"a.gguf": b"GGUF", "b.gguf": b"GGUF"},
            "",
            "contains more than one GGUF file: use the path of one of a.gguf, b.gguf",
        ),
        ({"a.gguf": b"version https://git-lfs"}, "", "a.gguf' is not a GGUF file: it does not start with GGUF"),
        ({"m-00001-of-00002.gguf": b"GGUF", "m-00002-of-00002.gguf": b"GGUF"}, "", "llama-gguf-split --merge"),
        ({}, "a.gguf", "a.gguf': there is no such file"),
        ({"a.gguf": b"GGUF" + bytes(20)}, "a.gguf", "a.gguf' cannot be converted to "),
    ],
)
def test_files_that_are_no_whole_model_are_refused(files, given, message, cache, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    with pytest.raises(UsageError, match=message):
        find_model(ModelConfig(pretrain=str(folder / given)))
    assert not cache.exists() or not [path for path in cache.iterdir() if path.is_dir()]


def test_a_missing_package_is_named(monkeypatch, cache, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UsageError, match=r"a\.gguf' is a GGUF file, and the package gguf is not installed \(extra `gguf`"
    ):
        resolve_model_path(str(tmp_path))


def test_the_folder_of_a_hub_cache_stands_for_the_snapshot_of_main(tiny_model_dir, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    for path in Path(tiny_model_dir).iterdir():  # cache files are symbolic links to blobs
        (snapshot / path.name).symlink_to(path)
    assert resolve_model_path(str(repository)) == str(snapshot)
    assert resolve_model_path(str(snapshot)) == str(snapshot)


def test_a_converted_file_is_found_without_importing_what_converted_it(tiny_model_dir, cache, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_model_dir, file, quantise=True)
    folder = resolve_model_path(str(file))
    program = (
        "import sys, pathlib\n"
        "from rlhf_cli.models.gguf import converted, find_gguf\n"
        "print(converted(find_gguf(pathlib.Path(sys.argv[1]))))\n"
        "assert not {'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, folder), done.stderr
