"""The last layer's MLP runs only for tokens that are used, without changing results."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_cli.data.packing.packs import TokenSequence, at_targets, pack
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.last_mlp import LastMLP
from rlhf_cli.models.policy import PolicyModel

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}


def dense():
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def experts():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))


@pytest.fixture(params=[dense, experts])
def model(request):
    torch.manual_seed(0)
    made = request.param().eval()
    made.set_attn_implementation("eager")
    return made


def one_sequence():
    return pack([TokenSequence(np.arange(20, dtype=np.int32) * 7 % 60, np.arange(20) > 14)])


def rows_of_layers(model):
    """Record the number of tokens in each layer's MLP."""
    rows: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    return rows


def test_what_is_read_stays_as_it_is_in_value_and_gradient(model):
    batch = one_sequence()
    log_p = torch.log_softmax(model(input_ids=batch.input_ids_T[None]).logits[0], -1)
    expected = log_p[batch.rows_K].gather(-1, batch.targets_K[:, None]).squeeze(-1)
    found, _ = PolicyModel(model)(batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    grads = (torch.autograd.grad(values.square().sum(), parameters) for values in (found, expected))
    for grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)


def test_only_the_last_layer_is_spared_tokens(model):
    policy, rows = PolicyModel(model), rows_of_layers(model)
    policy(one_sequence())
    assert rows == [20, 5]


def test_a_state_that_several_continuations_start_from_is_read_once():
    policy = PolicyModel(dense())
    rows = rows_of_layers(policy.model)
    continuations = tuple(
        Continuation(np.array([start, 3, 4], dtype=np.int32), np.ones(3, dtype=bool)) for start in (1, 2)
    )
    batch = pack_trees([Tree(np.arange(6, dtype=np.int32), continuations)], share_prompts=True)
    assert batch.rows_K.tolist() == [5, 6, 7, 5, 9, 10]
    assert batch.read_R.tolist() == [5, 6, 7, 9, 10]
    policy.model.set_attn_implementation(VARLEN)
    policy(batch)
    assert rows == [12, 5]


def test_a_pack_read_at_its_targets_reads_one_token_further():
    batch = at_targets(one_sequence())
    assert batch.read_R.tolist() == batch.rows_K.tolist() == [15, 16, 17, 18, 19]


class WithResidual(torch.nn.Module):
    def forward(self, hidden, residual):
        return residual + hidden.sin()


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].mlp = WithResidual()

    def forward(self, hidden):
        return self.layers[0].mlp(hidden, hidden)


def test_an_mlp_that_takes_more_than_hidden_states_has_all_tokens():
    decoder, hidden = OneLayer(), torch.randn(1, 6, 4)
    with LastMLP(decoder).only(torch.tensor([2, 5])):
        torch.testing.assert_close(decoder(hidden), hidden + hidden.sin())


def test_the_model_by_itself_and_one_that_computes_layers_again_have_all_tokens(model):
    batch = one_sequence()
    policy, rows = PolicyModel(model), rows_of_layers(model)
    before = model(input_ids=batch.input_ids_T[None]).logits
    policy(batch)
    torch.testing.assert_close(model(input_ids=batch.input_ids_T[None]).logits, before, atol=0, rtol=0)
    assert rows == [20, 20, 20, 5, 20, 20]
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows.clear()
    policy(batch)[0].sum().backward()
    assert rows == [20] * 4
