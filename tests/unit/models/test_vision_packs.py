"""Packs with images agree with separate sequences and with the model of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_vision import TINY_FAMILIES, random_picture, save_tiny_vision
from vision_sequences import plain_logprobs, vision_sequences

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.vision.pictures import picture_of_pixels
from rlhf_cli.models.vision.tower import RecentInputs

KINDS = [*TINY_FAMILIES, "idefics3 split"]
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    made = {kind: save_tiny_vision(kind, root / kind) for kind in TINY_FAMILIES}
    return made | {"idefics3 split": save_tiny_vision("idefics3", root / "split", splits=True)}


def load(folder: Path, **others: object) -> PolicyModel:
    return PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folder), param_dtype="fp32", **others)))


def weighted(logprobs_K: torch.Tensor) -> torch.Tensor:
    """Return a sum with a different weight for every token."""
    return (logprobs_K * torch.linspace(-1, 2, logprobs_K.numel())).sum()


def run(policy: PolicyModel, packs: list[list[TokenSequence]]) -> tuple[torch.Tensor, Gradients]:
    logprobs = torch.cat([policy(pack(sequences))[0] for sequences in packs])
    weighted(logprobs).backward()
    return logprobs.detach(), gradients(policy.model)


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: Gradients, expected: Gradients) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6 * largest, rtol=1e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_one_by_one_equals_transformers_in_logprobs_and_gradients(
    folders: dict[str, Path], kind: str
) -> None:
    sequences = vision_sequences(folders[kind])
    expected, plain = plain_logprobs(folders[kind], sequences)
    weighted(expected).backward()
    together, packed_gradients = run(load(folders[kind]), [sequences])
    alone, single_gradients = run(load(folders[kind]), [[sequence] for sequence in sequences])
    torch.testing.assert_close(together, expected.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert_same(packed_gradients, gradients(plain))
    assert_same(packed_gradients, single_gradients)
    assert any("vis" in name and gradient.abs().max() > 0 for name, gradient in packed_gradients.items())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_every_kernel_keeps_sequences_apart_with_and_without_pictures(
    folders: dict[str, Path], kind: str, attention: str
) -> None:
    policy = load(folders[kind], attn_implementation=attention)
    for sequences in (vision_sequences(folders[kind]), vision_sequences(folders[kind], [[], [], []])):
        expected = plain_logprobs(folders[kind], sequences)[0]
        with torch.no_grad():
            torch.testing.assert_close(policy(pack(sequences))[0], expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_a_pack_without_pictures_gives_the_tower_gradients_of_zero(folders: dict[str, Path], kind: str) -> None:
    policy = load(folders[kind])
    with_pictures = set(run(policy, [vision_sequences(folders[kind])])[1])
    for sequences in (vision_sequences(folders[kind], [[], []]), []):
        policy.zero_grad()
        found = run(policy, [sequences])[1]
        assert set(found) == with_pictures
        assert all(not gradient.any() for name, gradient in found.items() if "vis" in name)


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_gradient_checkpointing_changes_nothing(folders: dict[str, Path], kind: str) -> None:
    sequences = vision_sequences(folders[kind])
    expected, plain = run(load(folders[kind]).train(), [sequences])
    found, checkpointed = run(
        load(folders[kind], gradient_checkpointing=True, activation_offload=True).train(), [sequences]
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert_same(checkpointed, plain)


def test_a_sampled_placeholder_is_a_token_like_any_other(folders: dict[str, Path]) -> None:
    (sequence,) = vision_sequences(folders["qwen3_vl"], [[(56, 56)]])
    token = sequence.pictures[0].token
    ids = sequence.token_ids.copy()
    ids[-2] = token
    policy = load(folders["qwen3_vl"])
    with torch.no_grad():
        found = policy(pack([replace(sequence, token_ids=ids)]))[0]
    assert found.isfinite().all()
    assert found.numel() == sequence.num_trained


def test_a_picture_changes_what_follows_it(folders: dict[str, Path]) -> None:
    policy = load(folders["idefics3"])
    (sequence,) = vision_sequences(folders["idefics3"], [[(56, 56)]])
    (placed,) = sequence.pictures
    other = replace(placed, picture=picture_of_pixels("other", random_picture(56, 56, seed=9)))
    with torch.no_grad():
        one, two = (policy(pack([replace(sequence, pictures=(its,))]))[0] for its in (placed, other))
    assert (one - two).abs().max() > 1e-3


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_bfloat16_rounds_packs_up_and_stays_near(folders: dict[str, Path], kind: str) -> None:
    sequences = vision_sequences(folders[kind])
    half = PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folders[kind]), param_dtype="bf16")))
    with torch.no_grad():
        found, expected = (policy(pack(sequences))[0] for policy in (half, load(folders[kind])))
    assert (found - expected).abs().max() < 0.05


def test_the_last_inputs_of_the_tower_are_kept_within_a_bound() -> None:
    made: list[str] = []

    def make(picture: object) -> dict[str, torch.Tensor]:
        made.append(picture.digest)  # type: ignore[attr-defined]
        return {"pixel_values": torch.zeros(10)}

    recent = RecentInputs(make, most_bytes=80)
    for name in ("a", "b", "a", "c", "a", "b"):  # 40 bytes each: two fit
        recent[picture_of_pixels(name, random_picture(2, 2))]
    assert made == ["a", "b", "c", "b"]
