"""`rlhf serve-tinker` with Tinker's own client: training, sampling, custom losses, checkpoints and errors."""

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest
from tinker_server import KEY, NAME, tinker_server

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="pip install 'rlhf-cli[tinker]'")
FULL = [5, 6, 7, 8, 9, 10, 11, 12]
WEIGHTS = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def client(tiny_llama_dir, tmp_path_factory):
    import tinker

    with tinker_server(tiny_llama_dir, tmp_path_factory.mktemp("served") / "tinker", max_models=20) as server:
        found = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        yield found
        found.close("success").result()


@pytest.fixture
def rest(client) -> Any:
    import tinker

    return tinker.RestClient(base_url=client.holder._base_url, api_key=KEY)


@pytest.fixture(scope="module")
def types() -> Any:
    from tinker import types

    return types


def datum(types: Any, tokens: list[int] = FULL, inputs: dict[str, Any] | None = None) -> Any:
    given = {"target_tokens": tokens[1:]} | (inputs or {"weights": WEIGHTS})
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def step(training: Any, data: list, types: Any, loss: str = "cross_entropy", config: dict | None = None) -> Any:
    """Train once, and return the results of both requests, which are sent before either is awaited."""
    passed = training.forward_backward(data, loss, config)
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    return passed.result(), stepped.result()


def test_training_saving_and_loading(client, rest, types):
    training = client.create_lora_training_client(base_model=NAME, rank=8, seed=3).result()
    assert training.get_info().lora_rank == 8
    losses = [step(training, [datum(types)], types)[0].metrics["loss:sum"] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    path = training.save_state("half").result().path
    straight = [step(training, [datum(types)], types) for _ in range(2)]
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for passed, stepped in straight:
        again = step(resumed, [datum(types)], types)
        assert again[0].metrics == passed.metrics
        assert again[1].metrics == stepped.metrics
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    assert rest.get_training_run_by_tinker_path(path).result().last_checkpoint.tinker_path == path
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(training.model_id).result().checkpoints == []


def test_samples_agree_with_the_trainer(client, types):
    training = client.create_lora_training_client(base_model=NAME, rank=4).result()
    step(training, [datum(types)], types)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(FULL[:3])
    found = sampler.sample(
        prompt, 4, types.SamplingParams(max_tokens=12, stop=[]), include_prompt_logprobs=True
    ).result()
    data = [datum(types, FULL[:3] + one.tokens, {"weights": [1.0] * 14}) for one in found.sequences]
    passed = training.forward(data, "cross_entropy").result()
    for own, one in zip(passed.loss_fn_outputs, found.sequences, strict=True):
        np.testing.assert_allclose(own["logprobs"].data[2:], one.logprobs, atol=1e-4)
    assert found.prompt_logprobs[1:] == pytest.approx(passed.loss_fn_outputs[0]["logprobs"].data[:2], abs=1e-4)
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(found.prompt_logprobs[1:], abs=1e-4)
    named = training.save_weights_for_sampler("named").result().path
    other = client.create_sampling_client(model_path=named).result()
    assert other.compute_logprobs(prompt).result() == sampler.compute_logprobs(prompt).result()
    base = client.create_sampling_client(base_model=NAME).result()
    assert base.compute_logprobs(prompt).result() != sampler.compute_logprobs(prompt).result()


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ],
)
def test_losses_of_sampled_tokens_train(client, types, loss, config):
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    inputs = {"logprobs": [-3.0] * 7, "advantages": [0.0] * 3 + [1.0] * 4}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = [0.0] * 3 + [1.0] * 4
    first = step(training, [datum(types, inputs=inputs)], types, loss, config)
    assert np.isfinite(first[0].metrics["loss:sum"])
    assert first[1].metrics["skipped"] == 0


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(client, types):
    def cross_entropy(data: list, logprobs: list) -> tuple[Any, dict[str, float]]:
        pairs = zip(data, logprobs, strict=True)
        return -sum((one.loss_fn_inputs["weights"].to_torch() * row).sum() for one, row in pairs), {"own": 1.0}

    norms = []
    for custom in (False, True):
        training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
        if custom:
            passed = training.forward_backward_custom([datum(types)], cross_entropy).result()
            assert passed.metrics["own"] == 1
        else:
            training.forward_backward([datum(types)], "cross_entropy").result()
        norms.append(training.optim_step(types.AdamParams()).result().metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_errors_reach_the_caller(client, types):
    import tinker

    training = client.create_lora_training_client(base_model=NAME, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="its formula is not published"):
        training.forward_backward([datum(types)], "stable_reinforce").result()
    with pytest.raises(tinker.BadRequestError, match="'other' is not served here"):
        client.create_lora_training_client(base_model="other").result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert step(training, [datum(types)], types)[0].metrics["loss:sum"] > 0
