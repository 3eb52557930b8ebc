"""Private library functions still have the behaviour that the project relies on."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_cli.models.compat import (
    attention_name,
    compiled_template,
    has_bf16_products,
    prepare_amx,
    softmax_backward,
    without_partitions,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_softmax_is_autograds(dtype):
    scores = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    probabilities, grad = scores.softmax(-1), torch.randn(3, 5, dtype=dtype)
    probabilities.backward(grad)
    torch.testing.assert_close(softmax_backward(grad, probabilities.detach()), scores.grad)


def test_a_compiled_template_renders_as_transformers_does():
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template)
    assert compiled_template(template).render(messages=messages) == rendered[0] == "<user>1 + 1?<assistant>2"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_attention_of_a_model_is_known_by_name(name):
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.attn_implementation = name
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=name)
    assert attention_name(model.config) == name


def test_a_process_with_zero3_builds_models_without_partitions():
    held = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    with without_partitions():
        assert not is_deepspeed_zero3_enabled()
    assert is_deepspeed_zero3_enabled()
    del held
    assert not is_deepspeed_zero3_enabled()


def test_questions_about_the_processor_have_an_answer():
    assert has_bf16_products() in (True, False)
    prepare_amx()
