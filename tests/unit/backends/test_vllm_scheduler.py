"""Stop strings in vLLM's scheduler, with one or several new tokens in a step."""

import importlib.util
from types import SimpleNamespace

import pytest
from conftest import make_tiny_tokenizer
from transformers import Qwen2Config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    Qwen2Config().save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def ended(model: str, text: str, *, stop: list[str], before: str = "", longest: int = 99, eos_at: int | None = None):
    """Return the kept text of a step, whether the request is finished, and its status.

    The stand-in for vLLM's scheduler ends the request at `longest` tokens or at the new token number `eos_at`.
    """
    from vllm.v1.request import RequestStatus

    from rlhf_cli.backends.rollout.vllm_scheduler import STOP, _ended_at_stop_strings

    tokenizer = make_tiny_tokenizer()
    output = tokenizer.encode(before, add_special_tokens=False)
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={STOP: stop}), output_token_ids=output, status=RequestStatus.RUNNING
    )
    added = 0

    def update(request, new_token_ids):
        nonlocal added
        for count, token in enumerate(new_token_ids, start=1):
            request.output_token_ids.append(token)
            added += 1
            is_eos = added == eos_at
            if is_eos or len(request.output_token_ids) == longest:
                request.status = RequestStatus.FINISHED_STOPPED if is_eos else RequestStatus.FINISHED_LENGTH_CAPPED
                return new_token_ids[:count], True
        return new_token_ids, False

    config = SimpleNamespace(model_config=SimpleNamespace(model=model, trust_remote_code=False))
    new = tokenizer.encode(text, add_special_tokens=False)
    kept, is_finished = _ended_at_stop_strings(update, request, new, config)
    assert request.output_token_ids[len(request.output_token_ids) - len(kept) :] == kept
    return tokenizer.decode(kept), is_finished, request.status.name


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("abc", {"stop": []}, ("abc", False, "RUNNING")),
        ("abc", {"stop": ["x"]}, ("abc", False, "RUNNING")),
        # Tokens after the stop string are dropped, also if it began in an earlier step.
        ("abcd", {"stop": ["b"]}, ("ab", True, "FINISHED_STOPPED")),
        ("bcd", {"stop": ["abc"], "before": "xa"}, ("bc", True, "FINISHED_STOPPED")),
        ("b", {"stop": ["b"]}, ("b", True, "FINISHED_STOPPED")),
        # The length limit, before and at the end of the stop string.
        ("abcd", {"stop": ["d"], "longest": 3}, ("abc", True, "FINISHED_LENGTH_CAPPED")),
        ("abcd", {"stop": ["c"], "longest": 3}, ("abc", True, "FINISHED_STOPPED")),
        # An end-of-sequence token before the stop string.
        ("abcd", {"stop": ["c"], "eos_at": 2}, ("ab", True, "FINISHED_STOPPED")),
    ],
)
def test_a_step_ends_at_the_token_that_completes_a_stop_string(model, text, given, expected) -> None:
    assert ended(model, text, **given) == expected
