"""Images at reward servers: `rlhf serve-rm` with a vision-language model or a file, and third-party servers."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_rows import encoded
from server_requests import ask, request
from test_rewards_remote import Server, asking, running
from test_serve_rm import KEY, client_of, lengths, scoring, send, served
from tiny_vision import random_picture, save_tiny_vision
from transformers import AutoTokenizer
from vision_sequences import MIXED, plain_scores, vision_sequences

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.serve import ServedModelConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.errors import RunError
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.vision.pictures import Picture, picture_of_pixels, unexpanded
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.remote.client import RemoteRewards

MODEL = ServedModelConfig(param_dtype="fp32", max_len=200, max_tokens_per_gpu=200)
PICTURED = replace(request("a<image>"), pictures=(picture_of_pixels("one", random_picture(28, 56)),))
LEFT_OUT = "does not support images, but other reward servers do: it is not used"
TEXTS_ALONE = "does not support images: it scores text only"


def as_request(tokenizer: Any, sequence: TokenSequence) -> ScoreRequest:
    """Return the text of a sequence, with one placeholder per image, and its images."""
    text = tokenizer.decode(unexpanded(sequence.token_ids.tolist(), sequence.pictures), skip_special_tokens=False)
    return replace(request(text), pictures=tuple(placed.picture for placed in sequence.pictures))


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl"])
def test_a_served_vision_language_model_scores_texts_with_the_pictures_that_clients_send(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_vision(kind, tmp_path / "model")
    model, tokenizer = (
        load_value_backbone(ModelConfig(pretrain=str(folder), param_dtype="fp32")),
        AutoTokenizer.from_pretrained(folder),
    )
    torch.nn.init.normal_(model.score.weight, std=0.1)
    save_hf(model, tokenizer, tmp_path / "judge")
    sequences = vision_sequences(folder, [*MIXED, [(84, 56)]])
    expected = plain_scores(folder, sequences, model.score.weight.detach())
    requests = [as_request(tokenizer, sequence) for sequence in sequences]
    reward = RewardConfig(reward_pretrain=str(tmp_path / "judge"), reward_max_failures=1.0)
    with (
        scoring(reward, MODEL) as score,
        served(score, takes_images=score.takes_images) as url,
        client_of(url) as client,
    ):
        outcomes = ask(client, [*requests, replace(requests[0], pictures=())])
    assert [outcome.value for outcome in outcomes[:-1]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert expected[[0, -1]].diff().abs() > 1e-3  # the same text with other images
    assert outcomes[-1].failure is not None
    assert "the text's number of placeholders <" in outcomes[-1].failure.reason
    assert outcomes[-1].failure.reason.endswith("is 1, its number of pictures 0")


def test_a_served_file_that_names_images_gets_them(tmp_path: Path) -> None:
    file = tmp_path / "widths.py"
    file.write_text(
        "def reward_func(queries, prompts, labels, images):\n    return [sum(i.width for i in its) for its in images]\n"
    )
    reward = RewardConfig(reward_func=str(file), reward_max_failures=1.0)
    with (
        scoring(reward, MODEL) as score,
        served(score, takes_images=score.takes_images) as url,
        client_of(url) as client,
    ):
        outcomes = ask(client, [PICTURED, request("none"), replace(PICTURED, pictures=PICTURED.pictures * 2)])
    assert [outcome.value for outcome in outcomes] == [56.0, 0.0, 112.0]


def test_a_file_that_does_not_name_images_takes_texts_alone(tmp_path: Path) -> None:
    file = tmp_path / "lengths.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    return [len(query) for query in queries]\n")
    with scoring(RewardConfig(reward_func=str(file), reward_max_failures=1.0), MODEL) as score:
        assert not score.takes_images


def test_beside_a_server_that_sees_pictures_others_are_left_out() -> None:
    seeing, blind = Server(health=(200, b'{"images": true}', {})), Server()
    told: list[str] = []
    with (
        running(seeing),
        running(blind),
        RemoteRewards(
            [seeing.url, blind.url], key=None, tell=told.append, timeout=10, retries=1, batch_size=1
        ) as client,
    ):
        outcomes = ask(client, [PICTURED] * 6)
    assert all(outcome.failure is None for outcome in outcomes)
    assert blind.asked == []
    assert len(seeing.asked) == 6
    assert told == [f"the reward server {blind.url} {LEFT_OUT}"]


def test_a_server_whose_health_cannot_be_read_is_asked_again_and_not_taken_for_blind() -> None:
    server = Server(health=(500, b"", {}))
    with running(server), asking(server) as client:
        (failed,) = ask(client, [PICTURED])
    assert failed.failure is not None
    assert server.asked == []


def test_pictures_go_to_servers_that_report_to_take_them_and_others_are_named_once() -> None:
    seeing, blind = Server(health=(200, b'{"images": true}', {})), Server()
    told: list[str] = []
    with running(seeing), asking(seeing) as client:
        ask(client, [PICTURED, request("none")])
    (body,) = seeing.asked
    assert body["images"] == [[0], []]
    (url,) = body["distinct_images"]
    head, _, text = url.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(text).startswith(b"\x89PNG")
    with (
        running(blind),
        RemoteRewards([blind.url], key=None, tell=told.append, timeout=10, retries=1, batch_size=4) as client,
    ):
        ask(client, [request("none")])
        assert told == []
        ask(client, [PICTURED])
        ask(client, [PICTURED])
    assert all("images" not in body for body in blind.asked)
    assert told == [f"the reward server {blind.url} {TEXTS_ALONE}"]


def test_a_picture_whose_file_has_changed_fails_its_own_reward() -> None:
    def changed() -> np.ndarray:
        raise RunError("a.png has changed")

    server = Server(health=(200, b'{"images": true}', {}))
    with running(server), asking(server) as client:
        (failed,) = ask(client, [replace(PICTURED, pictures=(Picture("changed", 2, 2, changed),))])
        (answered,) = ask(client, [PICTURED])
    assert failed.failure is not None
    assert "was not called: a.png has changed" in failed.failure.reason
    assert answered.failure is None


PNG = f"data:image/png;base64,{base64.b64encode(encoded()).decode()}"


@pytest.mark.parametrize(
    ("images", "sees", "said"),
    [
        ([[PNG]], False, "images: this server's rewards do not support images"),
        ([], True, "images has 0 entries, but query has 1 texts"),
        ([[PNG] * 3], True, "query text 0 has 3 images, more than 2 (--max_images)"),
        ([[PNG, "/etc/hostname"]], True, "image 2 for query text 0 is no base64 text: "),
        ([["https://x.org/a.png"]], True, "image 1 for query text 0 is no base64 text: "),
        ([["data:text/plain,abc"]], True, "image 1 for query text 0 is no base64 text: "),
        ([["abcd"]], True, "image 1 for query text 0 is no picture in a format that is read"),
        ([PNG], True, "images.0: Input should be a valid array"),
        ([[0]], True, "images refers to image 0, but pictures has 0"),
    ],
)
def test_pictures_out_of_bounds_are_refused_in_one_sentence(images: Sequence[Any], sees: bool, said: str) -> None:
    with served(lengths, takes_images=sees, max_images=2) as url:
        status, answer, _ = send(url, {"query": ["a"], "images": images}, key=KEY)
        assert status == 422
        assert answer["detail"].startswith(said)
        assert send(url, {"query": ["good"], "images": [[]]})[0] == 200
