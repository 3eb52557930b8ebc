"""Expands image placeholders to the model's image tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from rlhf_cli.data.pictures.sources import SourcePicture, StandingPicture
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.models.vision.family import VisionFamily


def expanded(tokens: Tokens, pictures: Sequence[SourcePicture], family: VisionFamily) -> Tokens:
    """Replace each image placeholder with the image's tokens.

    Raises:
        TemplateFault: the numbers of placeholders and images differ, or a placeholder is in trained text.
    """
    found = tokens.ids.count(family.image_token)
    if found != len(pictures):
        raise TemplateFault(
            f"{len(pictures):,} pictures have {found:,} placeholders {family.placeholder} in the text that the chat "
            "template makes: it needs a place for each picture"
        )
    if not pictures:
        return tokens
    places = [place for place, token in enumerate(tokens.ids) if token == family.image_token]
    # Image tokens carry no loss, so they must not be inside trained text.
    if any(start <= place < stop for start, stop in tokens.spans for place in places):
        raise TemplateFault("a picture stands in text that is to be learned")
    runs = [picture.run.token_ids for picture in pictures]
    # Position of a bound after the images before it have grown.
    growth = [0, *accumulate(len(run) - 1 for run in runs)]

    def moved(bound: int) -> int:
        return bound + growth[bisect_left(places, bound)]

    ids, starts = with_runs(tokens.ids, runs, family.image_token)
    standing = tuple(
        StandingPicture(picture, start, family.image_token) for picture, start in zip(pictures, starts, strict=True)
    )
    spans = [(moved(start), moved(stop)) for start, stop in tokens.spans]
    return replace(tokens, ids=ids, spans=spans, pictures=standing)


def with_runs(token_ids: Sequence[int], runs: Sequence[Sequence[int]], placeholder: int) -> tuple[list[int], list[int]]:
    """Replace placeholders with the runs. Returns the token IDs, and each run's start."""
    ids: list[int] = []
    starts: list[int] = []
    left = iter(runs)
    for token in token_ids:
        if token == placeholder:
            starts.append(len(ids))
            ids += next(left)
        else:
            ids.append(token)
    return ids, starts
