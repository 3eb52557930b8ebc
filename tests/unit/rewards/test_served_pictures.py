"""Pictures at reward servers: `rlhf serve-rm` with a vision-language model or a file, and servers of others."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from rlhf_cli.config.serve import ServedModelConfig, ServedRewardConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.saving import save_hf
from rlhf_cli.models.vision.pictures import picture_of_pixels, unexpanded
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.remote.client import RemoteRewards
from rlhf_cli.runs.reward_server import takes_images

MODEL = ServedModelConfig(param_dtype="fp32", max_len=200, max_tokens_per_gpu=200)
PICTURED = replace(request("a<image>"), pictures=(picture_of_pixels("one", random_picture(28, 56)),))
TEXTS_ALONE = "takes texts alone: it does not see the pictures of prompts"


def as_request(tokenizer: Any, sequence: TokenSequence) -> ScoreRequest:
    """Return the text of a sequence with one placeholder a picture, and its pictures."""
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
    reward = ServedRewardConfig(reward_pretrain=str(tmp_path / "judge"))
    sees = takes_images(reward, MODEL)
    with scoring(reward, MODEL) as score, served(score, takes_images=sees) as url, client_of(url) as client:
        outcomes = ask(client, [*requests, replace(requests[0], pictures=())])
    assert [outcome.value for outcome in outcomes[:-1]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert expected[[0, -1]].diff().abs() > 1e-3  # the same text with other pictures
    assert outcomes[-1].failure is not None
    assert "the text's number of placeholders <" in outcomes[-1].failure.reason
    assert outcomes[-1].failure.reason.endswith("is 1, its number of pictures 0")


def test_a_served_file_that_names_images_gets_them(tmp_path: Path) -> None:
    file = tmp_path / "widths.py"
    file.write_text(
        "def reward_func(queries, prompts, labels, images):\n    return [sum(i.width for i in its) for its in images]\n"
    )
    reward = ServedRewardConfig(reward_func=str(file))
    assert takes_images(reward, MODEL)
    assert not takes_images(ServedRewardConfig(reward_funcs=["exact"]), MODEL)
    with scoring(reward, MODEL) as score, served(score, takes_images=True) as url, client_of(url) as client:
        outcomes = ask(client, [PICTURED, request("none"), replace(PICTURED, pictures=PICTURED.pictures * 2)])
    assert [outcome.value for outcome in outcomes] == [56.0, 0.0, 112.0]


def test_pictures_go_to_servers_that_report_to_take_them_and_others_are_named_once() -> None:
    seeing, blind = Server(health=(200, b'{"images": true}', {})), Server()
    told: list[str] = []
    with running(seeing), asking(seeing) as client:
        ask(client, [PICTURED, request("none")])
    (body,) = seeing.asked
    (url,), none = body["images"]
    assert none == []
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


PNG = f"data:image/png;base64,{base64.b64encode(encoded()).decode()}"


@pytest.mark.parametrize(
    ("images", "sees", "said"),
    [
        ([[PNG]], False, "images: the rewards of this server read texts alone"),
        ([], True, "images has 0 entries for 1 texts of query"),
        ([[PNG] * 3], True, "text 0 of query has 3 pictures, more than 2 (--max_images)"),
        ([[PNG, "/etc/hostname"]], True, "picture 2 of text 0 of query is no base64 text: "),
        ([["https://x.org/a.png"]], True, "picture 1 of text 0 of query is no base64 text: "),
        ([["data:text/plain,abc"]], True, "picture 1 of text 0 of query is no base64 text: "),
        ([["abcd"]], True, "picture 1 of text 0 of query is no picture in a format that is read"),
        ([PNG], True, "images.0: Input should be a valid array"),
    ],
)
def test_pictures_out_of_bounds_are_refused_in_one_sentence(images: Sequence[Any], sees: bool, said: str) -> None:
    with served(lengths, takes_images=sees, max_images=2) as url:
        status, answer, _ = send(url, {"query": ["a"], "images": images}, key=KEY)
        assert status == 422
        assert answer["detail"].startswith(said)
        assert send(url, {"query": ["good"], "images": [[]]})[0] == 200
