"""Program that runs vLLM engines on prompts with images, and writes results.

A Qwen-VL engine must find torchvision before anything imports transformers, which the test process has already done.
The program starts an engine per folder on the command line, and writes `findings.json` to it.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine_under_test import Engine

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError

SETTINGS = EngineSettings(max_model_len=512, dtype="fp32", num_threads=1, max_images_per_prompt=2)
SMALL_CACHE = 0.001
"""Cache size in GiB that cannot hold two of the requests' images as split by Idefics3."""
MOST_PIXELS = 8 * 28 * 28
"""Pixels of the largest image in the requests. Qwen-VL's processor would allow twice as many."""


@dataclass(frozen=True)
class Findings:
    """Measurements of one engine, in order.

    Attributes:
        difference: maximum difference between engine and trainer log-probs.
        sees_pictures: log-probs of the same question differ with another image.
        num_pictures_sent: number of images sent with pixels in the first batch.
        num_sent_again: the same in a batch that reuses its first image.
        difference_sent_again: like `difference`, for this batch.
        most_tokens: tokens of the largest image for which memory is reserved. too_many, wrong_run: errors for a prompt
        with three images, and for a prompt with a missing image token.
        is_as_before: the first batch gets the same answers again.
        num_placeholders: image placeholders in responses after pushing a model that prefers them.
        difference_with_placeholders: like `difference`, for these responses.
        difference_after_tower: like `difference`, after a push that changes only the vision encoder.
        change_by_tower: difference between responses before that push and the trainer after it.
    """

    difference: float
    sees_pictures: bool
    num_pictures_sent: int
    num_sent_again: int
    difference_sent_again: float
    most_tokens: int | None
    too_many: str
    wrong_run: str
    is_as_before: bool
    num_placeholders: int
    difference_with_placeholders: float
    difference_after_tower: float
    change_by_tower: float


def findings_of(folders: Sequence[Path], *, seconds: float = 500) -> dict[str, Findings]:
    """Return findings by folder name, computed in one process."""
    command = [sys.executable, __file__, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return {folder.name: Findings(**json.loads(_report(folder).read_text())) for folder in folders}


def _report(folder: Path) -> Path:
    return folder / "findings.json"


def look_at(folder: Path) -> Findings:
    """Start an engine, query it before and after pushes, and return the findings."""
    settings = replace(SETTINGS, max_pixels=MOST_PIXELS if "qwen" in folder.name else None)
    if folder.name == "idefics3":
        settings = replace(settings, vllm_args={"mm_processor_cache_gb": SMALL_CACHE})
    engine = Engine(str(folder), settings)
    try:
        return _findings(engine, folder)
    finally:
        engine.shutdown()


def _findings(engine: Engine, folder: Path) -> Findings:
    # Import after the engine has detected torchvision.
    import pictured_engines as pictured
    from vision_sequences import tiny_family

    trainer, requests = pictured.trainer_of(folder), pictured.pictured_requests(folder)
    sender, sampling = pictured.shm_sender(), pictured.SAMPLING

    def difference(generations: list[Generation]) -> float:
        asked = (requests * 2)[: len(generations)]
        return pictured.largest_difference(trainer, asked, generations)

    first = engine.generate(requests, sampling)
    found: dict[str, Any] = {
        "difference": difference(first),
        "sees_pictures": first[0].logprobs[0] != first[-2].logprobs[0],
        "num_pictures_sent": _num_pictures_sent(engine),
        "difference_sent_again": difference(engine.generate(requests + requests[:2], sampling)),
        "num_sent_again": _num_pictures_sent(engine),
        "most_tokens": _most_tokens(engine),
        "too_many": _complaint(engine, [replace(requests[0], pictures=requests[0].pictures * 3)], sampling),
        "wrong_run": _complaint(engine, [*requests, _shorter(requests[0])], sampling),
        "is_as_before": engine.generate(requests, sampling) == first,
    }
    pictured.prefer_placeholders(trainer, folder)
    engine.push(pictured.sent_weights(trainer, sender, 1), 1)
    second = engine.generate(requests, sampling)
    found["num_placeholders"] = sum(one.token_ids.count(tiny_family(folder).image_token) for one in second)
    found["difference_with_placeholders"] = difference(second)
    pictured.change_tower(trainer)
    engine.push(pictured.sent_weights(trainer, sender, 2), 2)
    found["difference_after_tower"] = difference(engine.generate(requests, sampling))
    found["change_by_tower"] = difference(second)
    sender.close()
    return Findings(**found)


def _num_pictures_sent(engine: Engine) -> int:
    statistics = engine.engine._llm.renderer.stat_mm_cache()
    return int(statistics.queries - statistics.hits)


def _most_tokens(engine: Engine) -> int | None:
    """Return the tokens of vLLM's largest startup image; None if vLLM creates an actual image to count them."""
    model = engine.engine._llm.renderer.get_mm_processor().info
    most = model.get_mm_max_tokens_per_item(SETTINGS.max_model_len, {"image": 1})
    return None if most is None else int(most["image"])


def _complaint(engine: Engine, requests: list[GenerationRequest], sampling: SamplingParams) -> str:
    try:
        engine.generate(requests, sampling)
    except (RunError, UsageError) as error:
        return str(error)
    return ""


def _shorter(request: GenerationRequest) -> GenerationRequest:
    """Return the request without the last token of its image."""
    (placed,) = request.pictures
    prompt_ids = request.prompt_ids[: placed.stop - 1] + request.prompt_ids[placed.stop :]
    return replace(request, prompt_ids=prompt_ids, pictures=(replace(placed, length=placed.length - 1),))


def main() -> None:
    """Write the findings for each folder on the command line."""
    for folder in map(Path, sys.argv[1:]):
        _report(folder).write_text(json.dumps(asdict(look_at(folder))))


if __name__ == "__main__":
    main()
