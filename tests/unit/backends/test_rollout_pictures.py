"""The transformers rollout engine with images: its log-probs equal the trainer's."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_under_test import REQUESTS, change_weights
from pictured_engines import (
    SAMPLING,
    change_tower,
    largest_difference,
    pictured_requests,
    prefer_placeholders,
    sent_weights,
    shm_sender,
    trainer_of,
)
from tiny_causal_models import tiny_text_only_config
from tiny_vision import TINY_FAMILIES, save_tiny_vision
from vision_sequences import tiny_family

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_host import fitted
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import language_model_class
from rlhf_cli.models.vision.families.table import TEXT_ONLY

SETTINGS = EngineSettings(max_model_len=256, dtype="fp32", max_images_per_prompt=2)


class Engine:
    """The engine with synchronous methods."""

    def __init__(self, folder, settings=SETTINGS):
        self.engine = TransformersEngine(str(folder), settings)

    def __getattr__(self, name):
        return lambda *args: asyncio.run(getattr(self.engine, name)(*args))

    def push(self, manifest, version):
        self.start_weight_update()
        self.update_weights(manifest)
        self.finish_weight_update(version)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    made = {kind: save_tiny_vision(kind, root / kind) for kind in TINY_FAMILIES}
    return made | {"idefics3 split": save_tiny_vision("idefics3", root / "split", splits=True)}


@pytest.mark.parametrize("kind", [*TINY_FAMILIES, "idefics3 split"])
def test_logprobs_are_the_trainers_before_and_after_pushes_of_the_tower_alone(folders, kind):
    folder, sender = folders[kind], shm_sender()
    engine, trainer, requests = Engine(folder), trainer_of(folder), pictured_requests(folder)
    first = engine.generate(requests, SAMPLING)
    assert largest_difference(trainer, requests, first) < 1e-5
    assert first[0].logprobs[0] != first[-2].logprobs[0]  # the same question with another image
    prefer_placeholders(trainer, folder)
    engine.push(sent_weights(trainer, sender, 1), 1)
    placeholders = engine.generate(requests, SAMPLING)
    assert sum(one.token_ids.count(tiny_family(folder).image_token) for one in placeholders) > 10
    assert largest_difference(trainer, requests, placeholders) < 1e-5
    change_tower(trainer)
    engine.push(sent_weights(trainer, sender, 2), 2)
    later = engine.generate(requests, SAMPLING)
    assert largest_difference(trainer, requests, later) < 1e-5
    assert largest_difference(trainer, requests, placeholders) > 1e-3
    assert [one.token_ids for one in later[2:4]] == [one.token_ids for one in placeholders[2:4]]  # without images
    sender.close()
    engine.shutdown()


@pytest.mark.parametrize(("kind", "text"), [*((kind, its[0]) for kind, its in TEXT_ONLY.items())])
def test_models_that_read_only_text_have_the_trainers_logprobs_before_and_after_a_push(kind, text, folders, tmp_path):
    config = tiny_text_only_config(kind, text)
    torch.manual_seed(0)
    model = language_model_class(config).from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, fitted(replace(SETTINGS, max_model_len=64), str(tmp_path)))
    trainer, requests, sender = trainer_of(tmp_path), REQUESTS[:5], shm_sender()
    first = engine.generate(requests, SAMPLING)
    assert largest_difference(trainer, requests, first) < 1e-5
    change_weights(trainer.model)
    engine.push(sent_weights(trainer, sender, 1), 1)
    assert largest_difference(trainer, requests, engine.generate(requests, SAMPLING)) < 1e-5
    assert largest_difference(trainer, requests, first) > 1e-3
    with pytest.raises(UsageError, match="supports only text"):
        engine.generate([replace(requests[0], pictures=pictured_requests(folders["llava"])[0].pictures)], SAMPLING)
    sender.close()
    engine.shutdown()


def test_a_batch_of_one_prompt_gives_the_responses_of_a_mixed_batch(folders):
    engine, requests = Engine(folders["qwen2_5_vl"]), pictured_requests(folders["qwen2_5_vl"])
    together = engine.generate(requests, SAMPLING)
    alone = [engine.generate([request], SAMPLING)[0] for request in requests]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    engine.shutdown()


def test_pictures_are_refused_beyond_the_engines_number_and_by_a_text_model(folders, tiny_model_dir):
    request = pictured_requests(folders["idefics3"])[0]
    engine = Engine(folders["idefics3"])
    twice = replace(request, prompt_ids=request.prompt_ids * 3, pictures=request.pictures * 3)
    with pytest.raises(UsageError, match="has 3 images; the engine's limit is 2"):
        engine.generate([twice], SAMPLING)
    assert engine.generate([request], SAMPLING)
    engine.shutdown()
    text = Engine(tiny_model_dir, replace(SETTINGS, max_model_len=64, max_images_per_prompt=None))
    with pytest.raises(UsageError, match="supports only text"):
        text.generate([replace(request, prompt_ids=request.prompt_ids[:20])], SAMPLING)
    text.shutdown()
