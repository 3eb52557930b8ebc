"""Peak bytes of activations and launches of a micro-batch on the fake device, with the plan's forecast.

    python activations.py LAYERS [PART_OF_A_NAME]...

LAYERS limits the layers of each published model, and the vocabulary to 32,768 tokens; 0 leaves all. Prints a JSON line
per case: planned and exact bytes above the weights, operators in the passes, and the program's line at the peak.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cases import TOTALS, Result, actor, batch_of, critic, offline
from device import CUDA, Device, fake_device
from models import model_on_gpu, with_adapter
from plans import plan_of
from preference_training import Task, dpo_task
from transformers import AutoConfig, PretrainedConfig

from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.prefix_packing import Continuation
from rlhf_cli.data.preference_data import Pair
from rlhf_cli.models import fused
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.planning.architectures import config_of, published
from rlhf_cli.trainers.offline.pairs import PairItems
from rlhf_cli.trainers.offline.sft import sft_objective

LENGTH = 1024
"""Tokens per sequence. All are trained, as the plan assumes."""
RANK = 16
"""Rank of adapters."""
SMALL_VOCABULARY = 32_768
QWEN = "Qwen/Qwen2.5-1.5B"
PERIODS = {"qwen3_5_text": 4, "lfm2": 3, "gemma2": 2}
"""Models by type, in the default sizes of transformers, and the number of layers after which kinds of layers repeat."""


@dataclass(frozen=True)
class Case:
    """A micro-batch of a command's trained model: a published one, or a key of `PERIODS`."""

    model: str
    tokens: int = 4096
    command: str = "grpo"
    recomputes: bool = False
    has_liger: bool = False
    has_adapter: bool = False

    @property
    def name(self) -> str:
        words = [self.model.rpartition("/")[2], str(self.tokens), self.command, "LoRA" if self.has_adapter else ""]
        words += ["recomputed" if self.recomputes else "kept", "Liger" if self.has_liger else ""]
        return " ".join(filter(None, words))

    @property
    def role(self) -> str:
        """Role of the trained model in the plan."""
        return {"grpo": "actor", "ppo": "critic"}.get(self.command, "model")


def _cases() -> Iterator[Case]:
    """Yield each case with kept and recomputed layers."""
    for recomputes in (False, True):
        for tokens, has_liger in product((4096, 15_360), (False, True)):
            yield Case(QWEN, tokens, recomputes=recomputes, has_liger=has_liger)
        for command in ("sft", "dpo", "ppo"):
            yield Case(QWEN, command=command, recomputes=recomputes)
        yield Case(QWEN, 15_360, recomputes=recomputes, has_adapter=True)
        for model, has_liger in product(("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"), (False, True)):
            yield Case(model, 8192, recomputes=recomputes, has_liger=has_liger)
        for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", *PERIODS):
            yield Case(model, recomputes=recomputes)
        yield Case("gemma2", recomputes=recomputes, has_liger=True)


def config_with(model: str, num_layers: int) -> PretrainedConfig:
    """Return the configuration of a published model, with at most this many layers if not 0, or a period of a type."""
    config = AutoConfig.for_model(model) if model in PERIODS else config_of(published()[model])
    layers = PERIODS.get(model, min(num_layers or config.num_hidden_layers, config.num_hidden_layers))
    values = config.to_dict() | {"num_hidden_layers": layers}
    if num_layers:
        values["vocab_size"] = min(config.vocab_size, SMALL_VOCABULARY)
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return AutoConfig.for_model(**values)


def planned(case: Case, config: PretrainedConfig) -> float:
    """Return the bytes of activations and logits in the plan of the command on one H100."""
    settings = {
        "train_max_tokens_per_gpu": case.tokens,
        "gradient_checkpointing": case.recomputes,
        "use_liger_kernel": case.has_liger,
        "lora_rank": RANK if case.has_adapter else None,
    }
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        role = plan_of(case.command, pretrain=folder, **settings).work.roles[case.role]
    parts = role.training(case.tokens, recomputes=case.recomputes)
    return parts["activations"] + parts["logits"]


def measured(case: Case, config: PretrainedConfig) -> dict[str, object]:
    """Return the peak of live bytes above the weights, with gradients freed when they arise as with ZeRO."""
    with fake_device() as device, _launches(device), ExitStack() as stack:
        head = "score" if case.role == "critic" else "tokens"
        model = model_on_gpu(config, head=head, checkpointing=case.recomputes)
        if case.has_liger:
            # Liger's rotary function would stay in the module of the model.
            stack.enter_context(patch.dict(vars(sys.modules[type(model).__module__])))
            fused.fuse(model)
        if case.has_adapter:
            with_adapter(model, RANK)
        module = ValueModel(model) if case.role == "critic" else PolicyModel(model)
        for weight in filter(lambda one: one.requires_grad, module.parameters()):
            weight.register_post_accumulate_grad_hook(_drop_gradient)
        gc.collect()
        device.restart()
        before = device.live
        _, loss = _loss(case, module)
        loss.backward()
        return {"exact": device.peak - before, "operators": device.operators.total(), "at_peak": device.at_peak}


def _drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


def _loss(case: Case, module: Any) -> Result:
    if case.command == "dpo":
        return offline(_pairs(case.tokens // (2 * LENGTH)), module, num_items=case.tokens // (2 * LENGTH))
    token_ids, trained = np.ones(LENGTH, np.int32), np.arange(LENGTH) > 0
    sequences = [TokenSequence(token_ids, trained)] * (case.tokens // LENGTH)
    if case.command == "sft":
        return module, sft_objective(module, pack(sequences).to(CUDA), TOTALS)[0]
    return (critic if case.role == "critic" else actor)(module, batch_of(sequences).to(CUDA))


def _pairs(count: int) -> Task:
    """Return `rlhf dpo` on pairs of two tokens that are read once and two responses."""
    size = LENGTH - 1
    response = Continuation(np.ones(size, np.int32), np.ones(size, bool))
    pairs = [Pair(np.ones(2, np.int32), response, response, 0.0)] * count
    lengths = {"prompt_length": 2, "chosen_length": size, "rejected_length": size, "num_trained": 2 * size}
    columns = {name: np.full(count, length, np.int32) for name, length in lengths.items()}
    data = LoadedData(pairs, columns, report=None, row_of=None, fingerprint=str)  # type: ignore[arg-type]
    return Task(dpo_task("sigmoid").objective, PairItems(data, True, read_ends=False, columns={}))


@contextmanager
def _launches(device: Device) -> Iterator[None]:
    """Count Triton kernels instead of launching them."""
    from triton.runtime.jit import JITFunction

    def launch(kernel: JITFunction, *_: object, **__: object) -> None:
        device.operators[kernel.fn.__name__] += 1

    gpu = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)
    pretended: dict[str, Any] = {"get_device_properties": lambda *_: gpu, "device": lambda *_: nullcontext()}
    with patch.multiple(torch.cuda, **pretended), patch.object(JITFunction, "run", launch):
        yield


def main(layers: str, *parts: str) -> None:
    for case in _cases():
        if not parts or any(part in case.name for part in parts):
            config = config_with(case.model, int(layers))
            found = {"layers": config.num_hidden_layers, "planned": planned(case, config), **measured(case, config)}
            print(json.dumps({"name": case.name, **vars(case), **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
