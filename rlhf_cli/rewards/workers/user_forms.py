"""Supported reward function signatures and the arguments for each.

Parameter names select the signature. Runs only in workers.
"""

import base64
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rlhf_cli.rewards.records import BadResult


class _UserRow(TypedDict):
    """A prompt row: the columns, and the prompt as text or, for conversational data, as messages."""

    prompt: object
    columns: dict[str, object]


class UserBatch(TypedDict):
    """Input to one call; lists have one entry per response.

    - `rows`, `row_of`: distinct rows, and the row index for each response.
    - `messages`: turns and observations from an episode; [] without an environment.
    - `pictures`, `pictures_of`: distinct base64 PNG files, and the image indices for each response. Both are empty if
      the function does not use images.
    """

    queries: list[str]
    prompts: list[str]
    labels: list[str | None]
    responses: list[str]
    raw_responses: list[str]
    token_ids: list[list[int]]
    lengths: list[int]
    finish_reasons: list[str]
    sources: list[str | None]
    rows: list[_UserRow]
    row_of: list[int]
    messages: list[list[dict[str, Any]]]
    pictures: list[str]
    pictures_of: list[list[int]]


@dataclass
class Log:
    """Metrics reported through callbacks: a list with one value per response, or one number for all."""

    metrics: dict[str, object] = field(default_factory=dict)

    def metric(self, name: str, value: object) -> None:
        """Log a metric, like TRL's `log_metric`."""
        self.metrics[name] = value

    def extra(self, column: str, values: object) -> None:
        """Log a column, like TRL's `log_extra`. Text columns are ignored."""
        self.metrics[column] = values


_OWN = ("queries", "prompts", "labels", "responses", "raw_responses", "token_ids", "finish_reasons", "messages")
"""Arguments for the native signature, in addition to row columns and `--reward_func_args`."""


def _rows(batch: UserBatch) -> list[_UserRow]:
    return [batch["rows"][place] for place in batch["row_of"]]


def _columns(batch: UserBatch) -> dict[str, list[object]]:
    """Transpose rows to columns; missing values are None."""
    rows = [row["columns"] for row in _rows(batch)]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _with_images(batch: UserBatch, columns: dict[str, list[object]]) -> dict[str, list[object]]:
    """Add `images`, a list of PIL images per response, if images were sent.

    Without images, an existing `images` column is kept: rows for a text model may have one.
    """
    if not batch["pictures_of"]:
        return columns
    # Imported lazily: only functions with an `images` parameter need PIL.
    from PIL import Image

    files = [io.BytesIO(base64.b64decode(picture)) for picture in batch["pictures"]]
    pictures = [Image.open(file) for file in files]
    images: list[object] = [[pictures[number] for number in numbers] for numbers in batch["pictures_of"]]
    return columns | {"images": images} if pictures else {"images": images} | columns


def _own(batch: UserBatch, _: Log) -> dict[str, list[object]]:
    own = [name for name in _OWN if name != "messages" or any(batch["messages"])]
    return _with_images(batch, _columns(batch)) | {name: batch[name] for name in own}  # type: ignore[literal-required]


def _of_trl(batch: UserBatch, log: Log) -> dict[str, object]:
    prompts = [row["prompt"] for row in _rows(batch)]
    completions = [
        messages or (text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
        for prompt, text, messages in zip(prompts, batch["responses"], batch["messages"], strict=True)
    ]
    columns = {name: cells for name, cells in _columns(batch).items() if name not in ("prompt", "completion")}
    given = {"prompts": prompts, "completions": completions, "completion_ids": batch["token_ids"]}
    return _with_images(batch, columns) | given | {"log_metric": log.metric, "log_extra": log.extra}


def _truths(batch: UserBatch) -> list[object]:
    """Return ground truths from the rows, since verl allows arbitrary objects; labels are strings."""
    models = [row["columns"].get("reward_model") for row in _rows(batch)]
    return [
        model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else label
        for model, label in zip(models, batch["labels"], strict=True)
    ]


def _of_verl(batch: UserBatch, _: Log) -> dict[str, list[Any]]:
    extra = [row["columns"].get("extra_info") or {} for row in _rows(batch)]
    return {
        "data_source": batch["sources"],
        "solution_str": batch["responses"],
        "ground_truth": _truths(batch),
        "extra_info": extra,
    }


def _of_verl_batch(batch: UserBatch, log: Log) -> dict[str, object]:
    return {f"{name}s": values for name, values in _of_verl(batch, log).items()}


def _of_easyr1(batch: UserBatch, _: Log) -> dict[str, object]:
    columns = zip(batch["responses"], batch["lengths"], _truths(batch), strict=True)
    names = ("response", "response_length", "ground_truth")
    return {"reward_inputs": [dict(zip(names, values, strict=True)) for values in columns]}


def _of_easyr1_each(batch: UserBatch, log: Log) -> dict[str, object]:
    return {"reward_input": _of_easyr1(batch, log)["reward_inputs"]}


@dataclass(frozen=True, slots=True)
class _Form:
    """A supported signature, selected by the parameter name `mark`. With `each`, it is called once per response."""

    name: str
    mark: str
    signature: str
    arguments: Callable[[UserBatch, Log], dict[str, Any]]
    each: bool = False


OWN_FORM = _Form("rlhf", "", "reward_func(queries, prompts, labels, **columns)", _own)
_FORMS = (
    _Form("TRL", "completions", "reward_func(completions, **columns)", _of_trl),
    _Form("verl", "solution_str", "compute_score(data_source, solution_str, ground_truth, extra_info)", _of_verl, True),
    _Form("verl", "solution_strs", "compute_score(data_sources, solution_strs, ground_truths, ...)", _of_verl_batch),
    _Form("EasyR1", "reward_inputs", "compute_score(reward_inputs)", _of_easyr1),
    _Form("EasyR1", "reward_input", "compute_score(reward_input)", _of_easyr1_each, True),
)
"""Signatures from other frameworks."""


@dataclass(frozen=True)
class _Signature:
    """How to call a function.

    - `names`: parameters that accept keyword arguments.
    - `required`: parameters without a default.
    - `takes_all`: the function has `**kwargs`.
    - `by_place`: queries, prompts and labels are passed positionally.
    """

    form: _Form
    names: frozenset[str]
    required: frozenset[str]
    takes_all: bool
    by_place: bool

    @property
    def needs(self) -> list[str]:
        """Large inputs to send to the worker: rows, token IDs, raw responses and images."""
        # Images only if the function names them: encoding is slow, and a function with **kwargs rarely reads them.
        wanted = {"token_ids": "completion_ids" if self.form.name == "TRL" else "token_ids"}
        wanted["raw_responses"] = "raw_responses"
        reads = [name for name, word in wanted.items() if self.takes_all or word in self.names]
        reads += ["images"] if "images" in self.names else []
        return ["rows", *reads] if not self.by_place or self.names or self.takes_all else reads


def signature_of(reward: Callable[..., object], args: Mapping[str, object]) -> _Signature:
    """Return how to call a user's function. Raises BadResult for an unknown signature or unsupported `args`."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    # Functions from C extensions may have no signature.
    except ValueError:
        return _Signature(OWN_FORM, frozenset(), frozenset(), takes_all=False, by_place=True)
    if any(one.name == "environments" and one.default is one.empty for one in parameters):
        raise BadResult(
            "has a function with TRL's `environments` parameter, which is not supported: environments run in other "
            "processes. To use their `reward` attribute, pass --reward_funcs environment"
        )
    signature = _signature(parameters)
    if signature is None:
        forms = "; ".join(form.signature for form in (OWN_FORM, *_FORMS))
        named = ", ".join(map(str, parameters))
        raise BadResult(f"has a function with unsupported parameters ({named}); supported signatures: {forms}")
    unknown = [name for name in args if name not in signature.names and not signature.takes_all]
    if unknown:
        raise BadResult(f"has no parameter {unknown[0]!r} (--reward_func_args)")
    return signature


def _signature(parameters: list[inspect.Parameter]) -> _Signature | None:
    kinds = inspect.Parameter
    named = [one for one in parameters if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    names = {one.name for one in named}
    takes_all = any(one.kind is kinds.VAR_KEYWORD for one in parameters)
    form = next((form for form in _FORMS if form.mark in names), OWN_FORM)
    placed = [one for one in parameters if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_place = False
    if form is OWN_FORM and not names & {"queries", "responses", "raw_responses", "messages"}:
        by_place = len(placed) >= 3 or any(one.kind is kinds.VAR_POSITIONAL for one in parameters)
        if not by_place:
            return None
        named = [one for one in named if one not in placed[:3]]
    return _Signature(
        form,
        frozenset(one.name for one in named),
        frozenset(one.name for one in named if one.default is kinds.empty),
        takes_all=takes_all,
        by_place=by_place,
    )


def call(
    reward: Callable[..., Any], signature: _Signature, batch: UserBatch, *, args: Mapping[str, Any], log: Log
) -> Any:
    """Call the function and return the result; a list of results if it is called once per response.

    Raises BadResult if a required argument is neither a row column nor in `args`.
    """
    given = signature.form.arguments(batch, log)
    lists = {name: value for name, value in given.items() if signature.takes_all or name in signature.names}
    missing = sorted(signature.required - {*lists, *args})
    if missing:
        has = ", ".join(_columns(batch)) or "none"
        raise BadResult(
            f"requires {missing[0]!r}, which is neither a row column nor in --reward_func_args; columns: {has}"
        )
    if signature.form.each:
        count = len(batch["responses"])
        return [reward(**{name: values[i] for name, values in lists.items()}, **args) for i in range(count)]
    if signature.by_place:
        for name in ("queries", "prompts", "labels"):
            lists.pop(name, None)
        return reward(batch["queries"], batch["prompts"], batch["labels"], **(lists | dict(args)))
    return reward(**(lists | dict(args)))
