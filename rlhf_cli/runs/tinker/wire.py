"""Protocol buffers of the Tinker API: requests with training data, and responses with arrays.

The schema lists only the fields that this server reads and writes; the parser skips all others.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rlhf_cli.backends.training.adapter_trainer import Datum
from rlhf_cli.errors import UsageError

PROTOBUF = "application/x-protobuf"

_PACKAGE = "rlhf_tinker"
# Message: fields as number:name:type; a type with * is repeated. Maps are repeated entries on the wire.
_SCHEMA = {
    "ForwardBackwardRequest": "1:model_id:string 2:seq_id:int32 3:data:Datum* 4:loss_fn:string"
    " 5:loss_fn_config:NumberEntry* 6:forward_only:bool 7:loss_fn_config_v2:ConfigEntry*",
    "NumberEntry": "1:key:string 2:value:double",
    "ConfigEntry": "1:key:string 2:value:ConfigValue",
    "ConfigValue": "1:number:double 2:text:string",
    "Datum": "1:model_input:Chunk* 2:loss_fn_inputs:TensorEntry*",
    "TensorEntry": "1:key:string 2:value:Tensor",
    "Chunk": "1:encoded_text:Tokens 2:image:Other 3:dmel:Other",
    "Tokens": "1:tokens:bytes",
    "Other": "",
    "Tensor": "1:dense:bytes 2:sparse_csr:SparseCsr 3:dtype:int32 4:shape:int64*",
    "SparseCsr": "1:values:bytes 2:crow_indices:bytes 3:col_indices:bytes",
    "SampleResponse": "1:sequences:Sequence* 2:prompt_logprobs:bytes",
    "Sequence": "1:stop_reason:int32 2:tokens:bytes 3:logprobs:bytes",
    "ForwardBackwardOutput": "1:loss_fn_output_type:string 2:loss_fn_outputs:ArrayRecord* 3:metrics:NumberEntry*",
    "ArrayRecord": "1:type_tag:string 2:fields:ArrayEntry* 3:num_datums:int64",
    "ArrayEntry": "1:key:string 2:value:BatchedTensor",
    "BatchedTensor": "1:data:bytes 2:offsets:bytes 3:dtype:int32 4:trailing_shape:int64*",
}
_DTYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_STOP, _LENGTH = 0, 1


def _messages() -> dict[str, object]:
    """Build a message class for each entry of the schema."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        described = file.message_type.add(name=name)
        for entry in fields.split():
            number, field, kind = entry.split(":")
            plain = kind.removesuffix("*")
            label = kinds.LABEL_OPTIONAL if plain == kind else kinds.LABEL_REPEATED
            added = described.field.add(name=field, number=int(number), label=label)
            if plain in _SCHEMA:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    # A pool of its own: the client registers the same messages if it runs in this process.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _SCHEMA)
    return dict(zip(_SCHEMA, map(message_factory.GetMessageClass, found), strict=True))


_MESSAGES = _messages()


def message(name: str) -> Any:
    """Return a message class of the schema."""
    return _MESSAGES[name]


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """A request for a forward pass, or a forward and a backward pass."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Decode a request. Raises UsageError if it is malformed or contains anything except text tokens."""
    try:
        sent = message("ForwardBackwardRequest").FromString(body)
    except DecodeError:
        raise UsageError("the body is no ForwardBackwardRequest in protocol buffers") from None
    config: dict[str, float | str] = {entry.key: entry.value for entry in sent.loss_fn_config}
    # Newer clients send numbers twice, and text only here.
    config |= {entry.key: entry.value.text or entry.value.number for entry in sent.loss_fn_config_v2}
    data = [_datum(datum, number) for number, datum in enumerate(sent.data)]
    return ForwardBackwardRequest(
        sent.model_id, sent.seq_id, data, sent.loss_fn, config, forward_only=sent.forward_only
    )


def _datum(datum: Any, number: int) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise UsageError(f"data[{number}]: model_input has chunks other than text tokens, which are not supported")
    chunks = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input]
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, "<i4")
    return Datum(tokens, {entry.key: _array(entry.value, entry.key, number) for entry in datum.loss_fn_inputs})


def _array(tensor: Any, name: str, number: int) -> np.ndarray:
    """Decode a dense array, or a sparse one with zeros for all cells that are not listed."""
    where = f"data[{number}]: loss_fn_inputs {name}"
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UsageError(f"{where} must be float32 or int64")
    shape = tuple(tensor.shape)
    try:
        if not tensor.HasField("sparse_csr"):
            # Copied, because torch requires writable memory.
            dense = np.frombuffer(tensor.dense, dtype).copy()
            return dense.reshape(shape) if shape else dense
        sparse = tensor.sparse_csr
        rows, columns = (np.frombuffer(part, "<i8") for part in (sparse.crow_indices, sparse.col_indices))
        found = np.zeros(shape, dtype)
        found[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns] = np.frombuffer(sparse.values, dtype)
    except (ValueError, IndexError):
        raise UsageError(f"{where} does not have the {shape} values of its shape") from None
    return found


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode the log-probs of each datum, float32 with the shape of its targets, and metrics."""
    output = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    # One record per number of targets at a position, because all arrays of a record share the trailing shape.
    for trailing, group in itertools.groupby(logprobs, key=lambda values: values.shape[1:]):
        arrays = [np.ascontiguousarray(values, "<f4") for values in group]
        offsets = np.cumsum([0, *(values.nbytes for values in arrays)]).astype("<i8")
        record = output.loss_fn_outputs.add(num_datums=len(arrays))
        value = record.fields.add(key="logprobs").value
        value.data = b"".join(values.tobytes() for values in arrays)
        value.offsets, value.dtype = offsets.tobytes(), _FLOAT32
        value.trailing_shape.extend(trailing)
    for key, number in metrics.items():
        output.metrics.add(key=key, value=number)
    encoded: bytes = output.SerializeToString()
    return encoded


@dataclass(frozen=True)
class SampledTokens:
    """A sampled sequence: token ids, log-probs in nats, and whether it ended before the limit."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool


def sample_response(sequences: Sequence[SampledTokens], prompt_logprobs: np.ndarray | None) -> bytes:
    """Encode sampled sequences, and log-probs of the prompt's tokens, NaN where there are none."""
    response = message("SampleResponse")()
    for sequence in sequences:
        response.sequences.add(
            stop_reason=_STOP if sequence.is_stopped else _LENGTH,
            tokens=np.asarray(sequence.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    encoded: bytes = response.SerializeToString()
    return encoded
