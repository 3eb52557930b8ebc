"""Teachers with their own tokenizers."""

from collections.abc import Sequence

import torch

from rlhf_cli.config.data import TemplateConfig
from rlhf_cli.data.teachers import TeachersOfRows
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.data.tokenizing.token_texts import TokenTexts
from rlhf_cli.errors import UsageError
from rlhf_cli.models.distillation import TokenEvents
from rlhf_cli.runs.trained_model import ModelPlan


def teacher_tokens(
    template: TemplateConfig, student: ModelPlan, teachers: Sequence[ModelPlan]
) -> tuple[TeacherTokens, ...]:
    """Return the tokens of each teacher, next to the student's.

    Raises:
        UsageError: a tokenizer has no end token, or changes text.
    """
    own = _texts(template, student, "--pretrain")
    return tuple(TeacherTokens(own, _texts(template, teacher, "--teacher_pretrain")) for teacher in teachers)


def _texts(template: TemplateConfig, model: ModelPlan, flag: str) -> TokenTexts:
    tokenizer, what = model.tokenizer, f"{flag} {model.source.pretrain!r}"
    # The token that ends a turn first: a teacher reads it at the end of responses.
    ends = [end for end in (*Renderer(template, tokenizer).end_ids, tokenizer.eos_token_id) if end is not None]
    texts = TokenTexts(tokenizer, ends, num_rows=model.architecture.get_text_config().vocab_size, what=what)
    if not texts.end_ids:
        raise UsageError(f"{what}: its tokenizer has no end-of-sequence token (eos_token) that the model can predict")
    return texts


def token_events(tokens: TeacherTokens) -> TokenEvents:
    """Return the events of a teacher with its own tokenizer, for its ranks."""
    found = tokens.events
    return TokenEvents(*map(torch.from_numpy, (found.student, found.teacher, found.tokens)))


def teachers_facts(tokens: Sequence[TeacherTokens], assigned: TeachersOfRows | None) -> dict[str, str]:
    """Return summary lines for several teachers, and for teachers with their own tokenizers."""
    facts = {} if assigned is None else {"Teachers": assigned.summary}
    if not tokens:
        return facts
    shared = ", ".join(f"{len(one.events.tokens):,} of {len(one.student.texts):,}" for one in tokens)
    return facts | {"Tokens": f"the teacher reads its own; {shared} tokens of the student are also tokens there"}
