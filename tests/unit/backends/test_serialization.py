"""Objects that are sent to ranks arrive unchanged."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels

RNG = np.random.default_rng(0)


def sequence(length: int) -> TokenSequence:
    mask = RNG.random(length) < 0.5
    mask[0] = False
    return TokenSequence(RNG.integers(0, 1000, length).astype(np.int32), mask)


def sample(length: int) -> TokenSequence:
    made = sequence(length)
    columns = {name: RNG.random(made.num_trained).astype(np.float32) for name in ("old_logprobs", "advantages")}
    return replace(made, columns=columns)


def arrived(sent):
    return pickle.loads(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))


def test_pictures_arrive_with_their_sequences_and_a_message_has_equal_ones_once():
    def pixels():
        return RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)

    first, same, other = (picture_of_pixels(digest, pixels()) for digest in ("a", "a", "b"))
    sent = [replace(sequence(6), pictures=(PlacedPicture(one, 1, 2, token=9),)) for one in (first, same)]
    both = (PlacedPicture(other, 0, 2, token=9, grid=(1, 2)), PlacedPicture(first, 3, 2, token=9))
    sent += [sequence(4), replace(sequence(6), pictures=both)]
    ((found,),) = arrived(RankWork([[sent]])).steps
    assert [one.pictures for one in found] == [one.pictures for one in sent]
    assert found[0].pictures[0].picture is found[1].pictures[0].picture is found[3].pictures[1].picture
    assert len(pickle.dumps(RankWork([[sent]]))) < 2 * first.pixels.nbytes + 3000


def assert_equal_sequences(found: TokenSequence, sent: TokenSequence) -> None:
    for name in ("token_ids", "loss_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(sent, name), strict=True)


def test_micro_batches_of_sequences_arrive_empty_ones_too():
    sent = [[sequence(7), sequence(1)], [], [sequence(3)]]
    (found,) = arrived(RankWork([sent])).steps
    assert [len(members) for members in found] == [2, 0, 1]
    for one, other in zip(found, sent, strict=True):
        for pair in zip(one, other, strict=True):
            assert_equal_sequences(*pair)


def test_experts_arrive_and_a_sequence_without_any_has_none_of_its_tokens():
    experts = [RNG.integers(0, 8, (count, 3, 2), dtype=np.uint8) for count in (4, 2)]
    with_experts = [
        replace(sequence(count + 1), routed_experts=own) for count, own in zip((4, 2), experts, strict=True)
    ]
    ((found,),) = arrived(RankWork([[[with_experts[0], sequence(3), with_experts[1]]]])).steps
    for one, own in zip(found, (experts[0], experts[0][:0], experts[1]), strict=True):
        np.testing.assert_array_equal(one.routed_experts, own, strict=True)
    (((without,),),) = arrived(RankWork([[[sequence(3)]]])).steps
    assert without.routed_experts is None


@pytest.mark.parametrize("sent", [RankWork([]), RankWork([[]]), RankWork([[[]]])])
def test_nothing_arrives_as_nothing(sent):
    assert arrived(sent) == sent


def test_steps_arrive_and_a_sample_of_several_steps_travels_once():
    samples = [sample(length) for length in (5, 2, 9, 1)]
    totals = StepTotals(num_tokens=3, num_sequences=2)
    first, second = [[samples[2], samples[0]], []], [[samples[1]], [samples[3], samples[0]]]
    sent = RankWork([first, second], [totals, totals])
    found = arrived(sent)
    assert [[len(members) for members in step] for step in found.steps] == [[2, 0], [1, 2]]
    assert found.totals == sent.totals
    assert found.steps[0][0][1] is found.steps[1][1][1]
    for one, other in zip(found.steps, sent.steps, strict=True):
        for members, originals in zip(one, other, strict=True):
            for got, original in zip(members, originals, strict=True):
                assert_equal_sequences(got, original)
                assert got.columns.keys() == original.columns.keys()
                for name, values in original.columns.items():
                    np.testing.assert_array_equal(got.columns[name], values, strict=True)
