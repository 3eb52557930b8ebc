"""The HTTP endpoint of agent programs: OpenAI's formats with its own client, keys, interfaces and errors."""

import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from rlhf_cli.agents.chat_records import ChatRequest, Choice, Completion, Refused
from rlhf_cli.agents.endpoint import Caller, Endpoint
from rlhf_cli.data.formats.conversations import Message, ToolCall
from rlhf_cli.event_loop import LoopThread

TOOL = {"type": "function", "function": {"name": "look"}}
WORDS = Choice("It is é.", (), "stop", 2, (("It is", -0.5), (" é.", -1.25)))
CALLS = Choice("", (ToolCall("look", {"at": "ü"}, "call00000"),), "tool_calls", 1, (("x", -2.0),))


class Served:
    """An endpoint with its own event loop that gives the same answer to all requests and records them."""

    def __init__(self) -> None:
        self.asked: list[ChatRequest] = []
        self.answer: Completion | Refused = Completion((WORDS,), 7)
        self.caller, self.other = Caller(), Caller()
        self.endpoint = Endpoint(self._answer)
        self.thread = LoopThread("endpoint")
        self.thread.run(self.endpoint.start())
        self.endpoint.admit(self.caller)
        self.client = openai.OpenAI(base_url=self.endpoint.url, api_key=self.caller.key, max_retries=0)

    async def _answer(self, caller: Caller, asked: ChatRequest) -> Completion:
        assert caller is self.caller
        self.asked.append(asked)
        if isinstance(self.answer, Refused):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.client.close()
        self.thread.end(self.endpoint.close)

    def post(self, body: bytes, *, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict]:
        """Send a request without OpenAI's client and return the status and body of the response."""
        connection = http.client.HTTPConnection(urlsplit(self.endpoint.url).netloc, timeout=30)
        connection.request("POST", path, body, {"Authorization": f"Bearer {self.caller.key}"} | headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    def ask(self, **more):
        return self.client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}], **more)


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def test_an_answer_has_openais_form(served):
    reply = served.ask()
    assert (reply.model, reply.object, reply.choices[0].index) == ("gpt-4o", "chat.completion", 0)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("It is é.", "stop")
    assert reply.choices[0].logprobs is None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 2, 9)


def test_calls_have_ids_and_their_arguments_as_json(served):
    served.answer = Completion((CALLS,), 7)
    choice = served.ask(tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("call00000", "look", {"at": "ü"})


def test_logprobs_are_of_the_sampled_tokens(served):
    content = served.ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert served.asked[0].logprobs
    assert [(token.token, token.logprob) for token in content] == [("It is", -0.5), (" é.", -1.25)]
    assert bytes(content[1].bytes).decode() == " é."
    assert [[top.token for top in token.top_logprobs] for token in content] == [["It is"], [" é."]]


def test_a_stream_has_the_same_words_calls_and_usage(served):
    served.answer = Completion((WORDS, CALLS), 7)
    chunks = list(served.ask(stream=True, n=2, logprobs=True, stream_options={"include_usage": True}))
    deltas = [(one.index, one.delta, one.finish_reason) for chunk in chunks for one in chunk.choices]
    assert [(index, reason) for index, _, reason in deltas] == [(0, None), (0, "stop"), (1, None), (1, "tool_calls")]
    assert deltas[0][1].content == "It is é."
    (call,) = deltas[2][1].tool_calls
    assert (call.index, call.id, call.function.name) == (0, "call00000", "look")
    assert [token.logprob for token in chunks[1].choices[0].logprobs.content] == [-0.5, -1.25]
    assert chunks[-1].usage.total_tokens == 7 + 3


def test_openais_own_helper_for_streams_puts_them_together(served):
    served.answer = Completion((CALLS,), 7)
    with served.client.chat.completions.stream(
        model="x", messages=[{"role": "user", "content": "x"}], tools=[TOOL | {"strict": False}]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.arguments == '{"at": "ü"}'


def test_a_request_is_read_as_it_was_sent(served):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "good"}]},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "id": "a", "function": {"name": "look", "arguments": '{"at": 1}'}},
                {"type": "function", "id": "b", "function": {"name": "made up", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "seen"},
        {"role": "tool", "tool_call_id": "b", "content": "unknown"},
    ]
    served.client.chat.completions.create(
        model="x", messages=messages, tools=[TOOL], n=2, max_completion_tokens=5, stop="END", temperature=0.1
    )
    (asked,) = served.asked
    calls = (ToolCall("look", {"at": 1}, "a"), ToolCall("made up", {}, "b"))
    assert asked.messages == (
        Message("system", "be good"),
        Message("user", "x"),
        Message("assistant", "", calls),
        Message("tool", "seen", tool_call_id="a", name="look"),
        Message("tool", "unknown", tool_call_id="b"),  # a name that the template does not use
    )
    assert not asked.logprobs
    assert (asked.n, asked.max_tokens, asked.stop, asked.ignored) == (2, 5, ("END",), ("temperature",))
    assert asked.tools[0]["function"] == {
        "name": "look",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_a_repetition_has_the_identity_of_its_request_however_it_is_sent(served):
    served.ask()
    served.ask(stream=True).close()
    served.ask(seed=3)
    body = {"messages": [{"content": "x", "role": "user"}], "model": "gpt-4o"}
    served.post(json.dumps(body).encode())
    served.post(json.dumps(body).encode(), **{"x-stainless-retry-count": "1"})
    first, streamed, seeded, bare, retried = served.asked
    assert first.identity == streamed.identity == bare.identity == retried.identity != seeded.identity
    assert [one.is_first_try for one in served.asked] == [True, True, True, False, False]


def test_fields_that_would_change_the_turn_are_noticed_and_harmless_ones_are_not(served):
    served.ask(
        user="me", store=False, seed=3, reasoning_effort="low", extra_body={"min_tokens": 4, "chat_template_kwargs": {}}
    )
    assert sorted(served.asked[0].ignored) == ["min_tokens", "reasoning_effort", "seed"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request body is not valid JSON"),
        (b"[]", "the request body must be a JSON object"),
        (b"{}", "messages must be a list with at least one message"),
        (b'{"messages": [{"role": "user"}]}', "messages[0] with role user has no content"),
        (b'{"messages": [{"role": "bot", "content": ""}]}', "messages[0] must have one of the roles system, developer"),
        (b'{"messages": [{"role": "tool", "content": ""}]}', "messages[0] with role tool has no tool_call_id"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "has content other than text"),
        (b'{"messages": ["x"]}', "messages[0] must have one of the roles"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n must be an integer from 1 to 128: 0"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "5"}', "max_tokens must be an integer of at"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', "stop must be a string"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', 'tool_choice "required"'),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}', "response_"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools[0] must be a function with a name"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"}', "stop contains a lone surrogate"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
            b'{"name": "f", "parameters": {"properties": {"a": {"description": "\\ud800"}}}}}]}',
            "tools contains a lone surrogate",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}', "role assistant"),
        *(
            (b'{"messages": [{"role": "user", "content": "x"}], ' + field + b"}", "is not supported: omit it")
            for field in (
                b'"continue_final_message": true',
                b'"add_generation_prompt": false',
                b'"guided_json": {"type": "object"}',
                b'"structured_outputs": {"choice": ["a"]}',
                b'"chat_template_kwargs": {"enable_thinking": false}',
                b'"extra_body": {"top_k": 5}',
            )
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, '
            b'{"role": "user", "content": "x"}]}',
            "messages[0] calls f, but its arguments are not a JSON object",
        ),
    ],
)
def test_a_body_that_is_not_understood_is_refused_with_its_place(served, body, message):
    status, answer = served.post(body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert not served.asked


def test_a_refusal_has_openais_code(served):
    served.answer = Refused("too long", code="context_length_exceeded", param="messages")
    with pytest.raises(openai.BadRequestError) as error:
        served.ask()
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_only_the_key_of_a_running_episode_is_answered(served):
    for key in ("", "sk-", served.other.key, served.caller.key[:-1], served.caller.key + "x", "é"):
        status, answer = served.post(b"{}", Authorization=f"Bearer {key}".encode().decode("latin-1"))
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    status, _ = served.post(b"{}", Authorization=f"Basic {served.caller.key}")
    assert status == 401
    for scheme in ("bearer", "BEARER", "Bearer"):
        assert served.post(b"{}", Authorization=f"{scheme} {served.caller.key}")[0] == 400  # a body without messages
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.endpoint.url, api_key=served.other.key).models.list()
    served.ask()
    served.thread.call_soon(served.endpoint.dismiss, served.caller)
    with pytest.raises(openai.AuthenticationError):
        served.ask()
    assert len(served.asked) == 1


def test_no_other_interface_is_served(served):
    port = urlsplit(served.endpoint.url).port
    addresses = [
        address.address
        for found in psutil.net_if_addrs().values()
        for address in found
        if address.family == socket.AF_INET and address.address != "127.0.0.1"
    ]
    for address in ["127.0.0.2", *addresses]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=10)


def test_the_only_model_is_listed_and_other_paths_are_unknown(served):
    assert [model.id for model in served.client.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses is not available: use chat completions"):
        served.client.responses.create(model="x", input="x")
    assert served.post(b"{}", path="/v1/embeddings")[0] == 404
