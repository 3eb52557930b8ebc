"""Objects that are sent to ranks arrive unchanged."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.backends.roles.serialization import RankWork, SentWork, store, store_arrays
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


def message(sent: RankWork) -> bytes:
    return pickle.dumps(SentWork.of(sent), pickle.HIGHEST_PROTOCOL)


def arrived(sent: RankWork) -> RankWork:
    """Return the work as a rank gets it: an object is its own reference here."""
    work: RankWork = pickle.loads(message(sent)).work(sent.chunks)
    return work


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
    assert len(message(RankWork([[sent]]))) < 2 * first.pixels.nbytes + 3000


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


def test_what_teachers_read_arrives():
    rows = np.array([[0, 0, 2, 1], [2, 1, 1, 1]])
    given = [replace(sequence(3), teacher=1, teacher_reads=sequence(5), teacher_rows=rows), sequence(3)]
    ((found,),) = arrived(RankWork([[given]])).steps
    assert [one.teacher for one in found] == [1, 0]
    assert found[0].teacher_reads is not None
    for name in ("token_ids", "loss_mask"):
        sent, read = (getattr(one.teacher_reads, name) for one in (given[0], found[0]))
        np.testing.assert_array_equal(read, sent, strict=True)
    np.testing.assert_array_equal(found[0].teacher_rows, rows, strict=True)
    assert found[1].teacher_reads is None
    ((without,),) = arrived(RankWork([[[sequence(3)]]])).steps
    assert without[0].teacher_reads is None


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


class Chunk:
    """A reference, which is not the object."""

    def __init__(self, stored: object) -> None:
        self.stored = stored


def test_stored_tokens_are_not_in_the_message_and_a_rank_gets_only_its_chunks(monkeypatch):
    monkeypatch.setattr("rlhf_cli.backends.roles.serialization._CHUNK_TOKENS", 9)
    originals = [replace(sample(length), columns={}) for length in (5, 4, 9, 2)]
    put: list[Chunk] = []
    first, second, third, _ = found = store(originals, lambda array: put.append(Chunk(array)) or put[-1])  # type: ignore[func-returns-value]
    assert [len(chunk.stored) for chunk in put] == [9, 9, 2]  # type: ignore[arg-type]
    mixed = sequence(3)
    work = RankWork([[[second, mixed], [third]], [[first]]])
    assert work.chunks == put[:2]
    sent = SentWork.of(work)
    assert sent.token_ids.values.tolist() == mixed.token_ids.tolist()
    back = pickle.loads(pickle.dumps(sent)).work([chunk.stored for chunk in put[:2]])
    expected = [[[originals[1], mixed], [originals[2]]], [[originals[0]]]]
    for one, other in zip(back.steps, expected, strict=True):
        for members, wanted in zip(one, other, strict=True):
            for got, original in zip(members, wanted, strict=True):
                assert_equal_sequences(got, original)
    assert [one.num_trained for one in found] == [one.num_trained for one in originals]


def test_columns_in_the_store_are_not_in_the_message_and_arrive_with_others():
    samples = [sample(length) for length in (5, 4, 9)]
    put: list[Chunk] = []
    columns = [one.columns["old_logprobs"] for one in samples]
    old = store_arrays(columns, lambda array: put.append(Chunk(array)) or put[-1])  # type: ignore[func-returns-value]
    sent = [
        replace(one, columns={"advantages": one.columns["advantages"]}, stored={"old_logprobs": column})
        for one, column in zip(samples, old, strict=True)
    ]
    sent[1] = samples[1]  # such as an episode with branches, whose column was joined in the driver
    work = RankWork([[sent]])
    assert work.chunks == put
    own = SentWork.of(work).columns["old_logprobs"].values
    assert own.tolist() == samples[1].columns["old_logprobs"].tolist()
    ((found,),) = pickle.loads(message(work)).work([chunk.stored for chunk in put]).steps
    for got, original in zip(found, samples, strict=True):
        assert_equal_sequences(got, original)
        for name in original.columns:
            np.testing.assert_array_equal(got.columns[name], original.columns[name], strict=True)


def test_an_image_of_several_prompts_is_stored_once():
    pixels = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    same = [picture_of_pixels("a", pixels.copy()) for _ in range(2)]
    originals = [replace(sequence(6), pictures=(PlacedPicture(one, 1, 2, token=9),)) for one in same]
    put: list[object] = []
    found = store(originals, lambda stored: put.append(stored) or len(put))  # type: ignore[func-returns-value]
    assert [one for one in put if callable(one)] == [same[0].read]
    assert [one.pictures for one in found] == [one.pictures for one in originals]
    assert found[0].pictures[0].picture is found[1].pictures[0].picture
    assert len(message(RankWork([[found]]))) < 2000


def test_a_value_for_all_tokens_of_a_response_is_sent_once_and_arrives_at_each():
    advantages = [np.broadcast_to(np.float32(value), length) for value, length in ((0.5, 3), (-1.5, 70_000))]
    made = [TokenSequence(np.arange(one.size + 1, dtype=np.int32), np.arange(one.size + 1) > 0) for one in advantages]
    sent = [replace(one, columns={"advantages": own}) for one, own in zip(made, advantages, strict=True)]
    tokens = sum(len(one) for one in made)
    assert len(message(RankWork([[sent]]))) < 4 * tokens + tokens / 8 + 2000
    (((first, second),),) = arrived(RankWork([[sent]])).steps
    for got, own in zip((first, second), advantages, strict=True):
        np.testing.assert_array_equal(got.columns["advantages"], own, strict=True)
