"""Small untrained models with new tokenizers, for experiments without downloads.

The tokenizer is byte-level BPE with Qwen2 rules: digits are split, so numbers are read digit by digit.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from rlhf_cli.config.scratch import ArchitectureConfig, VisionTowerConfig
from rlhf_cli.models.folders import whole_folder

END_OF_TEXT, _START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Tokens that the Idefics3 processor writes for an image, and the end-of-turn token that it requires."""
_CHATML_WITH_IMAGES = _CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}",
)

_CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Markers around tool calls and results. They are not special tokens, because the model generates calls as text."""
_CHATML_WITH_TOOLS = (
    "{% set has_system = messages[0]['role'] == 'system' %}"
    "{% if tools %}{{ '<|im_start|>system\n' + (messages[0]['content'] + '\n' if has_system else '') }}"
    "{% for tool in tools %}{% set function = tool['function'] %}"
    "{{ function['name'] + '(' + (function['parameters'] or {})['properties'] | join(', ') + ')\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in (messages[1:] if tools and has_system else messages) %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user' if loop.first or loop.previtem['role'] != 'tool' }}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.last or loop.nextitem['role'] != 'tool' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Tool calls and results in Qwen notation.

Tools are listed as name(arguments), because small models cannot read descriptions.
"""


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, takes_images: bool = False, takes_tools: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a ChatML template; it can encode any text.

    `takes_images` adds the Idefics3 image tokens, and the template writes a placeholder per image. With `takes_tools`,
    the template lists tools and writes calls and results, and their markers are tokens.
    """
    # transformers loads the tokenizer of a Qwen2 model with Qwen2 rules, so train with the same rules.
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = (
        rules.normalizer,
        rules.pre_tokenizer,
        rules.decoder,
    )
    # Words in the template should be single tokens.
    words = ["system", "user", "assistant"]
    words += ["name", "arguments"] if takes_tools else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, _START_OF_TURN, END_OF_TURN, *(_IMAGE_TOKENS if takes_images else ())],
        # All 256 bytes, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_words(texts, words), trainer)
    # After training, so these tokens do not change the learned merges.
    tokenizer.add_tokens(list(_CALL_TOKENS) if takes_tools else [])
    template = _CHATML_WITH_IMAGES if takes_images else _CHATML_WITH_TOOLS if takes_tools else _CHATML
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[_START_OF_TURN],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def texts_in(value: object) -> Iterator[str]:
    """Yield every string in a row, including message lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)


def _with_words(texts: Iterable[str], words: list[str]) -> Iterable[str]:
    yield from texts
    # Repeat template words so that BPE merges them even if the texts do not contain them.
    yield from words * 100


def new_model(architecture: ArchitectureConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2 causal language model in bfloat16."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        # Multiples of 64 fill the tiles of matrix kernels.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **architecture.model_dump(),
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.to(torch.bfloat16)


def new_vision_model(
    architecture: ArchitectureConfig, tower: VisionTowerConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> Idefics3ForConditionalGeneration:
    """Return a randomly initialized Idefics3 model in bfloat16."""
    torch.manual_seed(seed)
    text = {
        "model_type": "llama",
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **architecture.model_dump(),
    }
    vision = {
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "hidden_size": tower.vision_hidden_size,
        "intermediate_size": 2 * tower.vision_hidden_size,
        "num_hidden_layers": tower.vision_num_hidden_layers,
        "num_attention_heads": tower.vision_num_attention_heads,
        "initializer_range": architecture.initializer_range,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE_TOKENS[0]),
        scale_factor=tower.scale_factor,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=architecture.tie_word_embeddings,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.to(torch.bfloat16)


def new_processor(tower: VisionTowerConfig, tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """Return the processor for such a model. Images are never split."""
    edge = {"longest_edge": tower.image_size}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, tower.num_image_tokens, chat_template=tokenizer.chat_template)


def save_new_model(model: PreTrainedModel, reader: PreTrainedTokenizerFast | Idefics3Processor, path: Path) -> None:
    """Atomically write a model and its tokenizer or processor as a Hugging Face folder."""
    with whole_folder(path) as written:
        model.save_pretrained(written)
        reader.save_pretrained(written)
