"""Models of `generate` and `eval`: full models, adapters and checkpoints, and what engines load."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_folders import Trained, outputs
from transformers import AutoModelForCausalLM

from rlhf_cli.commands.generate import GenerateConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.inference.model import find_inference_model
from rlhf_cli.runs.inference.run import model_under_test

pytestmark = pytest.mark.usefixtures("group_of_one")


def found(pretrain):
    return find_inference_model(ModelSource(pretrain=str(pretrain)))


def test_a_whole_model_is_loaded_from_where_it_is(tiny_model_dir, tmp_path):
    model = found(tiny_model_dir)
    with model.whole(tmp_path / "whole", tell=pytest.fail) as path:
        assert path == tiny_model_dir
    assert not (tmp_path / "whole").exists()
    assert Path(tiny_model_dir).is_dir()


@pytest.mark.parametrize(
    ("lora_rank", "part"), [(4, "run"), (4, "run/model"), (4, "checkpoint"), (0, "checkpoint"), (0, "checkpoint/model")]
)
def test_engines_load_an_adapter_or_a_checkpoint_as_a_whole_model_that_is_gone_afterwards(
    tiny_model_dir, tmp_path, lora_rank, part
):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=lora_rank)
    model = found(tmp_path / part.replace("checkpoint", str(run.checkpoint)))
    said: list[str] = []
    with model.whole(tmp_path / "whole", tell=said.append) as path:
        assert path == str(tmp_path / "whole")
        whole = AutoModelForCausalLM.from_pretrained(path)
        torch.testing.assert_close(outputs(whole), run.outputs(), atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "whole").exists()
    assert "Merging " in said[0]
    assert model.tokenizer("What", add_special_tokens=False).input_ids
    assert model.architecture.vocab_size == whole.config.vocab_size


def test_a_whole_model_is_gone_after_a_failure_too(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    seen = []

    def answer() -> None:
        with found(run.folder).whole(tmp_path / "whole", tell=print) as path:
            seen.append(Path(path).is_dir())
            raise RunError("an engine died")

    with pytest.raises(RunError, match="an engine died"):
        answer()
    assert seen == [True]
    assert not (tmp_path / "whole").exists()


def test_weights_that_changed_have_another_fingerprint(tiny_model_dir, tmp_path):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    marks = [found(path).fingerprint() for path in (run.folder, tmp_path / "run", run.checkpoint, tiny_model_dir)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3
    file = run.folder / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    marks.append(found(run.folder).fingerprint())
    settings = run.folder / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 3}))
    marks.append(found(run.folder).fingerprint())
    assert len(set(marks)) == 5


def test_what_cannot_answer_is_refused_before_anything_starts(tiny_model_dir, tmp_path):
    scores = Trained(tmp_path / "scores", tiny_model_dir, lora_rank=4, value=True)
    damaged = Trained(tmp_path / "damaged", tiny_model_dir, lora_rank=4)
    file = damaged.folder / "adapter_model.safetensors"
    save_file({name: tensor[:, :-1].clone() for name, tensor in load_file(file).items()}, file)
    several = Trained(tmp_path / "several", tiny_model_dir)
    (several.checkpoint / "other" / "deepspeed").mkdir(parents=True)
    cases = {
        scores.folder: "--pretrain .* returns scores",
        damaged.folder: "does not match its base model",
        several.checkpoint: "--pretrain .* contains multiple models: pass .*/model or .*/other",
        tmp_path / "gone": "there is no such folder",
    }
    for path, complaint in cases.items():
        with pytest.raises(UsageError, match=complaint):
            found(path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_more_positions_than_there_are_is_refused_where_vllm_answers(tiny_model_dir, tmp_path, backend):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+2="}))
    words = {"pretrain": str(tiny_model_dir), "prompt_data": str(prompts), "output": str(tmp_path / "out")}
    config = build_config(
        GenerateConfig, {**words, "max_len": "513", "max_new_tokens": "8", "rollout_backend": backend}
    )
    if backend == "vllm":
        with pytest.raises(UsageError, match="--max_len 513: the model has 512 positions"):
            model_under_test(config)
    else:
        assert model_under_test(config).chunks.num_prompts == 1
