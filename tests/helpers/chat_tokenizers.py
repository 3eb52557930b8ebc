"""Small byte-level tokenizers with chat templates of well-known models, for data tests."""

import json
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "system user assistant model first question first answer second question second answer",
    "What is the capital of France? Paris. What is 12 + 34? The answer is 46.",
    "USER: What? ASSISTANT: Paris ASSISTANT: Berlin ASSISTANT: Rome",
    "one\n\ntwo\n\nthree\n\nfour\n\n",
    "<think>\nwell\n</think>\n\nthen",
    "Answer:(yes) Answer:(no) Answer:(maybe)",
] * 20

SPECIALS = ("<|end|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_2_5 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
) + CHATML
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|stop|>\n\n' + message['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|start|>' + message['content'] }}"
    "{% else %}{{ '<|stop|>' + message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|stop|>' }}{% endif %}"
)
DEEPSEEK_R1 = (  # starts reasoning only in the generation prompt, and removes earlier reasoning
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|start|>' + message['content'] }}"
    "{% else %}{{ '<|stop|>' + message['content'].split('</think>')[-1] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|stop|><think>\n' }}{% endif %}"
)
QWEN_3 = (  # empty reasoning before the last answer, none before earlier ones
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI = (  # end of text after conversations without a following turn
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' <|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
GENERATION = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENING = {"Qwen 3": "<think>\n\n</think>\n\n"}
"""Text that the model must generate after the last generation prompt, by template."""
TRAINABLE = {
    "ChatML": CHATML,
    "Qwen 2.5": QWEN_2_5,
    "Llama 3": LLAMA_3,
    "Gemma": GEMMA,
    "DeepSeek": DEEPSEEK,
    "DeepSeek R1": DEEPSEEK_R1,
    "Qwen 3": QWEN_3,
    "Phi": PHI,
    "Vicuna": VICUNA,
    "Llama 2": LLAMA_2,
    "generation blocks": GENERATION,
}


def make_tokenizer(
    chat_template: str | None = None,
    *,
    adds_bos: bool = False,
    trim_offsets: bool = False,
    specials: Sequence[str] = SPECIALS,
    bos: str | None = "<|bos|>",
    eos: str = "<|end|>",
) -> PreTrainedTokenizerFast:
    """Create a byte-level BPE tokenizer that pads with the end-of-sequence token.

    `adds_bos` is like Llama, `trim_offsets` like GPT-2.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    byte_level = processors.ByteLevel(trim_offsets=trim_offsets)
    starts = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer.post_processor = processors.Sequence([byte_level, starts] if adds_bos else [byte_level])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_metaspace_tokenizer(
    chat_template: str, *, specials: Sequence[str], bos: str | None, eos: str
) -> PreTrainedTokenizerFast:
    """Create a tokenizer like Llama 2 and Mistral: spaces are part of words, and one is added after special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[^▁\n]+|▁+|\n+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=letters, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # After training, byte tokens are special, so decoding would skip them.
    tokenizer = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "added_tokens": []}))
    tokenizer.add_special_tokens([AddedToken(special, normalized=False) for special in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        unk_token="<unk>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
