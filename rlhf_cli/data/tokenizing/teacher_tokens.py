"""Sequences that a teacher with its own tokenizer and chat template reads, and their common positions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlhf_cli.data.formats.marks import runs_of
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.tokenizing.alignment import SharedEvents, shared_spans
from rlhf_cli.data.tokenizing.token_texts import END, TokenTexts


@dataclass(frozen=True)
class TeacherTokens:
    """Tokens of a student and of a teacher. They never read each other's IDs."""

    student: TokenTexts
    teacher: TokenTexts

    @cached_property
    def events(self) -> SharedEvents:
        """Events that both vocabularies share."""
        return SharedEvents.of(self.student, self.teacher)

    def response(self, token_ids: Sequence[int]) -> list[int]:
        """Return the teacher's tokens for a student's response, with an end token if it ends with one."""
        text, end, _ = b"".join(self.student.of(token_ids)).partition(END)
        ids = self.teacher.encoded_bytes(text)
        return [*ids, self.teacher.end_ids[0]] if end else ids

    def sampled(self, sequence: TokenSequence, prompt_ids: Sequence[int]) -> TokenSequence:
        """Return a prompt and sampled response, with what the teacher reads after its own prompt."""
        own = sequence.token_ids[int(sequence.loss_mask.argmax()) :]
        token_ids = np.array([*prompt_ids, *self.response(own.tolist())], np.int32)
        is_response_T = np.arange(len(token_ids)) >= len(prompt_ids)
        return self.aligned(sequence, TokenSequence(token_ids, is_response_T, teacher=sequence.teacher))

    def aligned(self, sequence: TokenSequence, other: TokenSequence) -> TokenSequence:
        """Return a student's sequence with the teacher's for the same messages.

        Each run of targets, such as a turn, is compared with the same run there.
        """
        rows, first, first_there = [np.zeros((0, 4), np.int64)], 0, 0
        for (start, stop), (begin, end) in zip(_runs(sequence), _runs(other), strict=False):
            texts = self.student.of(sequence.token_ids[start:stop]), self.teacher.of(other.token_ids[begin:end])
            rows.append(shared_spans(*texts) + np.array([first, first_there, 0, 0]))
            first, first_there = first + stop - start, first_there + end - begin
        return replace(sequence, teacher_reads=other, teacher_rows=np.concatenate(rows))


def _runs(sequence: TokenSequence) -> list[tuple[int, int]]:
    """Return the bounds of consecutive targets."""
    return list(runs_of(sequence.loss_mask.tolist()))
