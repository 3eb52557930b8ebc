"""A Tinker server in this process, and requests to it without Tinker's client."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli.commands.serve_tinker import ServeTinkerConfig
from rlhf_cli.rewards.server.app import StoppableServer
from rlhf_cli.runs.server_address import address_of, listening
from rlhf_cli.runs.tinker.app import tinker_app
from rlhf_cli.runs.tinker.run import running_service
from rlhf_cli.runs.tinker.wire import message

KEY = "tml-of-this-test"
NAME = "org/model"
TRAINED = (1.0, 0.0, 1.0, 1.0)


@dataclass
class TinkerServer:
    """A server's address, with the requests of a client."""

    url: str

    def send(self, path: str, body: Any = None, *, key: str = KEY, method: str = "POST") -> tuple[int, Any]:
        """Return status and body of a response, decoded if it is JSON. Bytes are sent as protocol buffers."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        connection.request(method, f"/api/v1/{path}", data if method == "POST" else None, {"X-API-Key": key})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        is_json = "json" in (response.getheader("Content-Type") or "")
        return response.status, json.loads(content) if is_json else content

    def ask(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """Return the body of a successful response."""
        status, said = self.send(path, body, method=method)
        assert status < 300, said
        return said

    def result(self, path: str, body: Any) -> Any:
        """Send a request and wait for its result."""
        return self.retrieved(self.ask(path, body)["request_id"])

    def retrieved(self, request_id: str) -> Any:
        """Wait for a result."""
        while True:
            status, said = self.send("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
            if status != 408:
                assert status == 200, said
                return said

    def session(self) -> str:
        """Return a new session's ID."""
        return self.ask("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})["session_id"]

    def model(self, session: str, number: int = 0, **lora: Any) -> str:
        """Create a model in training and return its ID."""
        body = {"session_id": session, "model_seq_id": number, "base_model": NAME, "lora_config": {"rank": 4} | lora}
        return self.result("create_model", body)["model_id"]


def training_request(model: str, seq: int, loss: str = "cross_entropy", **others: Any) -> bytes:
    """Encode a request for a forward and backward pass, as protocol buffers.

    `inputs` are loss inputs, and `tokens` the tokens, instead of those of an example; `config` is loss_fn_config.
    """
    request = message("ForwardBackwardRequest")(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=others.get("forward_only", False)
    )
    tokens: list[int] = others.get("tokens", [5, 6, 7, 8])
    inputs: Mapping[str, list] = others.get("inputs", {"target_tokens": [6, 7, 8, 9], "weights": list(TRAINED)})
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    for name, values in inputs.items():
        array = np.array(values)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        tensor = datum.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype == np.int64 else 1
        tensor.shape.extend(array.shape)
    for key, value in others.get("config", {}).items():
        request.loss_fn_config.add(key=key, value=value)
    return request.SerializeToString()


def output(content: bytes) -> tuple[np.ndarray, dict[str, float]]:
    """Decode a response to `training_request`: log-probs and metrics."""
    found = message("ForwardBackwardOutput").FromString(content)
    (record,) = found.loss_fn_outputs
    return np.frombuffer(record.fields[0].value.data, np.float32), {one.key: one.value for one in found.metrics}


def sampled(content: bytes) -> tuple[list[list[int]], list[np.ndarray], np.ndarray]:
    """Decode sampled tokens, their log-probs, and the prompt's log-probs."""
    found = message("SampleResponse").FromString(content)
    tokens = [np.frombuffer(one.tokens, np.int32).tolist() for one in found.sequences]
    logprobs = [np.frombuffer(one.logprobs, np.float32) for one in found.sequences]
    return tokens, logprobs, np.frombuffer(found.prompt_logprobs, np.float32)


@contextmanager
def tinker_server(model: str, output: Path, **settings: Any) -> Iterator[TinkerServer]:
    """Serve a model from the transformers engine until the end of the block."""
    config = ServeTinkerConfig(
        model={"pretrain": model, "param_dtype": "fp32"},
        engine={"rollout_backend": "transformers"},
        adapters={"output": str(output), "model_name": NAME} | settings,
    )
    stop, failures = threading.Event(), []

    async def serve(listener: Any) -> None:
        async with running_service(config) as service:
            app = tinker_app(service, key=KEY, max_body_mb=1.0)
            await StoppableServer(app, stop.is_set).serve(sockets=[listener])

    def run(listener: Any) -> None:
        try:
            asyncio.run(serve(listener))
        except Exception as error:
            failures.append(error)

    with listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=run, args=(listener,))
        thread.start()
        try:
            # Connections wait in the socket until the model is loaded.
            yield TinkerServer(address_of(listener))
        finally:
            stop.set()
            thread.join()
    assert not failures
