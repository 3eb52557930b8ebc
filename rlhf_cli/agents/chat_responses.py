"""OpenAI chat completion responses and errors, built from records."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli.agents.chat_records import Choice, Completion, Refused
from rlhf_cli.data.formats.conversations import ToolCall

MODEL = "policy"
"""Model name listed by the endpoint. Requests may use any name."""


@dataclass(frozen=True, slots=True)
class Form:
    """Response options from a request.

    `created` is a Unix timestamp in seconds. `num_top` is the requested `top_logprobs`; only the sampled token can be
    listed.
    """

    number: int
    created: int
    model: str = MODEL
    logprobs: bool = False
    num_top: int = 0
    include_usage: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any], *, number: int, created: int) -> "Form":
        """Read the options from a request body. Raises Refused if one is invalid."""
        options, num_top = body.get("stream_options") or {}, body.get("top_logprobs") or 0
        if not isinstance(options, dict):
            raise Refused("stream_options must be a JSON object", param="stream_options")
        if not isinstance(num_top, int):
            raise Refused("top_logprobs must be a number", param="top_logprobs")
        is_wanted, include_usage = bool(body.get("logprobs")), bool(options.get("include_usage"))
        return cls(number, created, str(body.get("model") or MODEL), is_wanted, num_top, include_usage)

    def whole(self, completion: Completion) -> dict[str, object]:
        """Build the response body."""
        choices = [
            {"index": index, "message": _message(one), **self._end(one)} for index, one in enumerate(completion.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(completion)}

    def chunks(self, completion: Completion) -> Iterator[str]:
        """Yield the server-sent events for a streamed response: a message and a finish reason for each choice."""
        for index, choice in enumerate(completion.choices):
            message = _message(choice)
            for place, call in enumerate(message.get("tool_calls", ())):
                # Required in streamed deltas only: clients assemble tool calls by index.
                call["index"] = place
            yield self._event([{"index": index, "delta": message, "logprobs": None, "finish_reason": None}])
            yield self._event([{"index": index, "delta": {}, **self._end(choice)}])
        if self.include_usage:
            yield self._event([], usage=_usage(completion))
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, object]], **more: object) -> str:
        return f"data: {json.dumps({**self._head('chat.completion.chunk'), 'choices': choices, **more})}\n\n"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": self.created, "model": self.model}

    def _end(self, choice: Choice) -> dict[str, object]:
        tokens = [self._token(*token) for token in choice.tokens]
        logprobs = {"content": tokens, "refusal": None} if self.logprobs else None
        return {"logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _token(self, text: str, logprob: float) -> dict[str, object]:
        token = {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
        return {**token, "top_logprobs": [token] if self.num_top else []}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.calls:
        # OpenAI sends null, not "", if a turn consists of tool calls only.
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall) -> dict[str, object]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _usage(completion: Completion) -> dict[str, int]:
    prompt, sampled = completion.prompt_tokens, completion.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def error_body(refused: Refused) -> dict[str, object]:
    """Build an error body."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def model_list() -> dict[str, object]:
    """Build the body for the model list."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf-cli"}
    return {"object": "list", "data": [model]}
