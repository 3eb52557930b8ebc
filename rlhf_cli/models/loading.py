"""Models and tokenizers from folders or the Hub.

A model's computation on a pack is in `policy`, how it becomes a folder again in `saving`; engines and sharding are in
the backends.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_bitsandbytes_available

from rlhf_cli.config.model import ModelConfig, ModelSource, TokenizerSource
from rlhf_cli.errors import UsageError, one_line
from rlhf_cli.models.attention.table import attention_needs, resolve_attention
from rlhf_cli.models.classifiers import refuse_classifier
from rlhf_cli.models.compat import has_bf16_products
from rlhf_cli.models.fused import fuse, is_installed, uses_fused_kernels
from rlhf_cli.models.weight_files import fingerprint, folder_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_BF16 = "this processor has no fast bf16 products: --param_dtype fp32 is many times faster here"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""At least one is in a folder with a tokenizer; without any, transformers makes up an empty one."""
ADAPTER_FILE = "adapter_config.json"
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep the sequences of a pack apart."""
WITHIN_POSITIONS = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
"""Scaled rotary positions whose number in the configuration is already the scaled one, to vLLM."""


def resolve_model_path(pretrain: str) -> str:
    """Folder with a model, or a Hub name. A run directory of this program stands for the model it trained.

    UsageError for a path that is no model, naming the missing file.
    """
    path = Path(pretrain).expanduser()
    if path.is_dir():
        return str(_model_folder(path))
    if path.exists():
        raise UsageError(f"pretrain {pretrain!r} is a file: give the folder of a model, or a Hub name")
    if pretrain.startswith((".", "/", "~")) or pretrain.endswith("/") or pretrain.count("/") > 1:
        raise UsageError(f"pretrain {pretrain!r}: there is no such folder")
    if not _is_in_hub_cache(pretrain) and not _hub_has_an_address():
        raise UsageError(f"pretrain {pretrain!r}: there is no such folder here, and no connection to the Hub")
    return pretrain


def weights_of(pretrain: str) -> str:
    """Return a fingerprint of the model's weights: a folder may hold the weights of a later run."""
    return fingerprint(folder_of(resolve_model_path(pretrain)))


def _is_in_hub_cache(name: str) -> bool:
    with contextlib.suppress(HFValidationError):
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    return False


def _hub_has_an_address() -> bool:
    """Return whether it is worth asking the Hub: without a network its client tries again for a minute before it
    reports that.
    """
    host = urlsplit(ENDPOINT).hostname
    if getproxies():
        return True
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def adapter_folder(pretrain: str) -> Path | None:
    """Folder of the adapter that this path stands for, itself or as the result of a run; None for other things."""
    path = Path(pretrain).expanduser()
    return next((folder for folder in (path, path / "model") if (folder / ADAPTER_FILE).is_file()), None)


def _model_folder(path: Path) -> Path:
    if adapter_folder(str(path)) is not None:
        raise UsageError(f"{str(path)!r} is an adapter, not a whole model: `rlhf merge` folds it into its base")
    if not (path / "config.json").is_file():
        if (path / "model" / "config.json").is_file():
            path = path / "model"
        elif (path / "config.yaml").is_file():
            raise UsageError(
                f"pretrain {str(path)!r} is a run directory without a finished model/: finish that run first"
            )
        else:
            raise UsageError(f"pretrain {str(path)!r} is no model: it has no config.json")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise UsageError(f"pretrain {str(path)!r} has a config.json but no weights (model.safetensors)")
    return path


@contextlib.contextmanager
def _naming_the_model(path: str, what: str) -> Iterator[None]:
    """Turn transformers' errors about files and names into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = one_line(error)
        if "trust_remote_code" in reason:
            reason = "the model brings Python code of its own; read that code, then give --trust_remote_code"
        elif not Path(path).is_dir():
            reason = f"not a local folder, and the Hub gave none ({reason})"
        raise UsageError(f"pretrain {path!r}: {what} cannot be loaded: {reason}") from error


def load_config(config: ModelSource) -> PretrainedConfig:
    """Hugging Face configuration of the model."""
    path = resolve_model_path(config.pretrain)
    with _naming_the_model(path, "the configuration"):
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)


def load_tokenizer(config: TokenizerSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with the chat template of the settings if there is one.

    No padding token is made up: training never pads, and one equal to the end of sequence would hide that token.
    """
    return read_tokenizer(_tokenizer_path(config.pretrain), config)


def read_tokenizer(path: str, config: TokenizerSource) -> PreTrainedTokenizerBase:
    """Return the tokenizer as `load_tokenizer` does, from that folder or Hub name whatever model the settings name."""
    if Path(path).is_dir() and not _has_tokenizer(Path(path)):
        raise UsageError(f"pretrain {path!r} has no tokenizer (tokenizer.json)")
    with _naming_the_model(path, "the tokenizer"):
        # Where vLLM is installed, transformers would take Mistral's own tokenizer (tekken.json), which has no template.
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, mistral_format=False
        )
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes up an empty one
        raise UsageError(
            f"pretrain {path!r}: the tokenizer has no vocabulary: a file such as tokenizer.json is missing"
        )
    if config.tokenizer_chat_template is not None:
        tokenizer.chat_template = _chat_template(config.tokenizer_chat_template)
    return tokenizer


def _tokenizer_path(pretrain: str) -> str:
    """Return the tokenizer's place: with the model or adapter, or with the base of an adapter as PEFT alone saves
    it."""
    adapter = adapter_folder(pretrain)
    if adapter is None:
        return resolve_model_path(pretrain)
    base = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return str(adapter) if _has_tokenizer(adapter) or not base else resolve_model_path(base)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _chat_template(source: str) -> str:
    if "{" in source:
        return source
    path = Path(source).expanduser()
    if not path.is_file():
        raise UsageError(f"tokenizer_chat_template {source!r} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")


def load_causal_lm(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Causal language model in evaluation mode, attention and gradient checkpointing set.

    Weights are read onto `device`, by default into host memory. With `partition`, a context of ZeRO-3, they are
    partitioned over ranks while they are loaded; with `in_4bit` they are quantised on this process's GPU, for training
    an adapter on them. UsageError for a model that gives scores.
    """
    refuse_classifier(load_config(config), f"pretrain {config.pretrain!r}")
    return _load(AutoModelForCausalLM, config, partition=partition, in_4bit=in_4bit, device=device)


def load_value_backbone(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Return the model with a scalar head `score`; a head that the folder does not have starts near zero, always the
    same.

    Its weights are normal with spread 1 / (hidden size + 1): normed hidden states then give values well under 1.
    """
    return _load(
        AutoModelForSequenceClassification,
        config,
        partition=partition,
        in_4bit=in_4bit,
        device=device,
        num_labels=1,
    )


def load_reward_model(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
) -> PreTrainedModel:
    """Return the model with the scalar head `score` that its folder has. Raise UsageError if it has none."""
    return _load(
        AutoModelForSequenceClassification,
        config,
        partition=partition,
        device=device,
        num_labels=1,
        has_score_head=True,
    )


def check_trainable(architecture: PretrainedConfig) -> None:
    """UsageError for a model that cannot be trained by any process, found before any weight is read."""
    others = sorted(set(getattr(architecture.get_text_config(), "layer_types", None) or ()) - PACKED_LAYERS)
    if others:  # recurrent, chunked, convolutions: they would mix the sequences of a pack
        kind = architecture.model_type
        raise UsageError(f"models of type {kind} cannot be trained on packs: layers {', '.join(others)}")


def check_positions(architecture: PretrainedConfig, max_len: int) -> None:
    """UsageError where vLLM would not start, as sequences get longer than the positions that the model has."""
    text = architecture.get_text_config()
    key = "model_max_length" if getattr(text, "model_max_length", None) else "max_position_embeddings"
    positions = getattr(text, key, None)
    is_unlimited = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    if positions is None or is_unlimited:
        return
    known = int(positions * _stretch(text))
    if max_len > known:
        raise UsageError(
            f"--max_len {max_len}: the model has {known} positions ({key} in its config.json), and vLLM takes no "
            "longer sequences"
        )


def _stretch(text: PretrainedConfig) -> float:
    """Return how many times the positions of the configuration vLLM takes, for rotary ones that are scaled by a
    factor.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    if "gemma3" in text.model_type:
        return 1.0
    scaled = [kind for kind in kinds if kind.get("rope_type") not in WITHIN_POSITIONS]
    return max((kind.get("factor") or 1.0 for kind in scaled), default=1.0)


def check_loadable(config: ModelConfig, architecture: PretrainedConfig, *, in_4bit: bool, partitioned: bool) -> None:
    """Raise UsageError, before any weight is read, if this process cannot load the model for training."""
    check_trainable(architecture)
    no_gpu = not torch.cuda.is_available()
    faults = (
        (
            partitioned and config.compile_model,
            "compile_model does not go with --zero_stage 3, which gathers weights between layers",
        ),
        (partitioned and in_4bit, "load_in_4bit does not go with --zero_stage 3, which cannot partition 4-bit weights"),
        (
            in_4bit and no_gpu,
            "load_in_4bit needs an NVIDIA GPU; without it the model is trained under its adapter as is",
        ),
        (in_4bit and not is_bitsandbytes_available(), "load_in_4bit: bitsandbytes is not installed (extra `quant`)"),
    )
    for applies, fault in faults:
        if applies:
            raise UsageError(fault)
    _uses_fused_kernels(config, architecture)
    packed_attention(config, architecture)


def _uses_fused_kernels(config: ModelConfig, architecture: PretrainedConfig) -> bool:
    return uses_fused_kernels(
        config.use_liger_kernel,
        architecture,
        on_gpu=torch.cuda.is_available(),
        compiled=config.compile_model,
        installed=is_installed(),
    )


def _quantised(config: ModelConfig) -> dict[str, object]:
    """Return the arguments of `from_pretrained` that quantise linear layers (NF4) on this process's GPU."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.param_dtype],
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def placed_on(device: torch.device | None) -> dict[str, object]:
    """Return what `from_pretrained` takes to read weights straight onto a GPU, without a copy in host memory."""
    return {} if device is None or device.type == "cpu" else {"device_map": {"": device}}


def _load(
    auto_class: Any,
    config: ModelConfig,
    *,
    partition: AbstractContextManager[None] | None,
    in_4bit: bool = False,
    has_score_head: bool = False,
    device: torch.device | None = None,
    **options: object,
) -> PreTrainedModel:
    path = resolve_model_path(config.pretrain)
    dtype = DTYPES[config.param_dtype]
    architecture = load_config(config)
    check_loadable(config, architecture, in_4bit=in_4bit, partitioned=partition is not None)
    attention = packed_attention(config, architecture)
    with partition or contextlib.nullcontext(), _naming_the_model(path, "the model"):
        model, report = auto_class.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **(_quantised(config) if in_4bit else placed_on(None if partition else device)),
            **options,
        )
    if not model.is_backend_compatible():
        raise UsageError(f"{type(model).__name__} cannot be trained on packs: its attention takes no other kernel")
    _complete_weights(model, path, report, has_score_head=has_score_head)
    if next(model.parameters()).is_cuda and _uses_fused_kernels(config, architecture):
        fuse(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile_model:
        # In place: no name in the state dict changes. Packs differ in length, so shapes are symbols from the start.
        model.get_decoder().compile(dynamic=True)
    return model


def dtype_note(config: ModelConfig) -> dict[str, str]:
    """Return a line for the terminal, by its name, where models that run in this process would be slow in their
    type.
    """
    is_slow = config.param_dtype == "bf16" and not has_bf16_products()
    return {"Note": SLOW_BF16} if is_slow and not torch.cuda.is_available() else {}


def packed_attention(config: ModelConfig, architecture: PretrainedConfig) -> str:
    """Name of the attention kernel that a model of this architecture runs with on packs."""
    return resolve_attention(
        config.attn_implementation,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=DTYPES[config.param_dtype],
        needs=attention_needs(architecture),
    )


def _complete_weights(model: PreTrainedModel, path: str, report: dict[str, Any], *, has_score_head: bool) -> None:
    """Fill a scalar head that the folder need not have; any other weight that is missing is a UsageError."""
    missing = set(report["missing_keys"]) - set(model.all_tied_weights_keys)
    if "score.weight" in missing and not has_score_head:
        missing.remove("score.weight")
        fill(model.score.weight, _value_head(model.config.hidden_size))
    wrong = sorted(missing) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UsageError(
            f"pretrain {path!r}: the weights do not fit its config.json: {len(wrong)} missing or of another "
            f"shape, the first is {wrong[0]}"
        )


def _value_head(hidden_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter, or this rank's share of one that ZeRO-3 has partitioned."""
    with torch.no_grad():
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(values)
            return
        shard = parameter.ds_tensor
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        own = values.flatten()[start : start + shard.numel()]
        shard[: own.numel()].copy_(own)


def num_parameters(model: nn.Module) -> int:
    """Return the parameters of the whole model, each counted once, also where ZeRO-3 has partitioned them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def quadratic_cost(config: PretrainedConfig) -> float:
    """q such that a sequence of L tokens costs in proportion to L + q L^2 (multiplications of a forward pass).

    A token takes one multiplication per weight of the projections, MLP and head, in a mixture only the chosen experts;
    causal attention L^2 / 2 times 2 multiplications per layer and dimension of the query heads.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    query = text.num_attention_heads * head_size
    key_value = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
    weights = layers * (2 * hidden * query + 2 * hidden * key_value + 3 * hidden * _active_width(text))
    return layers * query / (weights + hidden * text.vocab_size)


def _active_width(text: PretrainedConfig) -> int:
    """Return the width of the MLPs that a token runs through in a layer; of a mixture, in a layer with experts."""
    dense: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_active = getattr(text, "num_experts_per_tok", None)
    if not num_active:
        return dense
    expert: int = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None)
    return int(num_active * expert + (shared or (getattr(text, "n_shared_experts", None) or 0) * expert))
