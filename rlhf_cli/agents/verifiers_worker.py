"""Script for the interpreter with the verifiers package (0.4.0): lists the tasks in an environment, or plays them.

    python verifiers_worker.py check NAME          loads the environment
    python verifiers_worker.py rows NAME FILE      writes its tasks as rows
    python verifiers_worker.py play NAME           plays episodes; standard input is a socket (agents/verifiers.py)

It imports nothing from rlhf_cli, which that interpreter does not have.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any
from urllib.parse import unquote

BAD_NAME = 2
"""Exit status if the environment cannot be loaded. Standard output then completes "verifiers:NAME ..."."""
_HARNESS = "rlhf_chat"
# Of the endpoint (trainers/online/program_player.py).
_LIMITS = ("max_turns_exceeded", "context_length_exceeded")
# SubprocessRuntime of verifiers hides variables with API_KEY in their names from the model's commands.
_KEY = "RLHF_API_KEY"
_MOST_BYTES = 1 << 26
Foreign = Any
"""An object from verifiers, openai or mcp, whose types are unknown in the driver."""
_NO_PROMPT = "(The environment writes the first message.)"


class _Unusable(Exception):
    """The environment cannot be used. The message completes "verifiers:NAME ..."."""


def main(action: str, name: str, *paths: str) -> int:
    """Run an action. Returns the exit status."""
    try:
        env, select = load(name)
        if action == "rows":
            write_rows(env, select, paths[0])
    except _Unusable as error:
        print(error)
        return BAD_NAME
    if action == "play":
        asyncio.run(play(env, socket.socket(fileno=0)))
    return 0


def load(name: str) -> tuple[Foreign, Foreign]:
    """Return the environment of `NAME?SETTING=VALUE&...`, and the selection of its tasks.

    Settings are those of `vf-eval`, without `--env.`, and `select`. Agents without a harness of their own chat in this
    process, and those without a runtime have a folder on this machine.

    Raises:
        _Unusable: there is no such environment or setting, or it has several agents.
    """
    package, _, query = name.partition("?")
    if not package:
        raise _Unusable("names no environment: write verifiers:NAME, with an installed package")
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        advice = f"{sys.executable} -m pip install verifiers==0.4.0"
        raise _Unusable(f"requires the package verifiers, 0.4.0 or later ({error}): {advice}") from error
    try:
        settings = settings_of(query)
        select = vf.SelectConfig.model_validate(settings.pop("select", {}))
        settings.setdefault("taskset", {})["id"] = package
        fields = vf.env_config_type(package, settings.get("id") or "").model_fields
        agents = {key: field.default for key, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
        if len(agents) != 1:
            raise _Unusable(f"has {len(agents)} agents ({', '.join(agents)}), and only one can be trained")
        (role, default) = next(iter(agents.items()))
        agent = settings.setdefault(role, {})
        if "runtime" not in default.model_fields_set:
            agent.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and vf.default_harness_id(package) == "bash":
            sys.modules[_HARNESS] = _harness_module(vf)
            agent.setdefault("harness", {"id": _HARNESS})
        return vf.load_environment(vf.resolve_env_config(settings)), select
    except ModuleNotFoundError as error:
        missing = error if error.__cause__ is None else error.__cause__
        wanted = package.rsplit("/", 1)[-1].split("@")[0].replace("-", "_").lower()
        if getattr(missing, "name", None) != wanted:
            raise _Unusable(f"cannot be imported: {_line(missing)}") from error
        advice = f"{sys.executable} -m pip install PACKAGE"
        raise _Unusable(f"is not installed: this interpreter has no module {wanted}: {advice}") from error
    # Constructors of environments check their settings, and raise anything.
    except (Exception, SystemExit) as error:
        if isinstance(error, _Unusable):
            raise
        raise _Unusable(f"cannot be loaded: {_line(error)}") from error


def settings_of(query: str) -> dict[str, Foreign]:
    """Return the nested settings of `taskset.num_tasks=10&agent.max_turns=3`."""
    settings: dict[str, Foreign] = {}
    for part in filter(None, query.split("&")):
        path, _, text = part.partition("=")
        *groups, last = path.replace("-", "_").split(".")
        place = settings
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise _Unusable(f"has the setting {group!r} twice, as a value and as a group")
        place[last] = _value(unquote(text))
    return settings


def _value(text: str) -> Foreign:
    """Read a value as `vf-eval` does: None, JSON, or else text. `null` is the name of a harness."""
    if text in ("None", "null"):
        return None if text == "None" else text
    try:
        return json.loads(text)
    except ValueError:
        return text


def write_rows(env: Foreign, select: Foreign, path: str) -> None:
    """Write the selected tasks as JSON lines: `prompt` for people and lengths, `task` for the episode.

    Raises:
        _Unusable: the tasks never end, or cannot be loaded.
    """
    try:
        tasks = env.taskset.select(select)
        if not tasks.bounded:
            raise _Unusable("never runs out of tasks: limit them, as in ?select.limit=1000")
        with open(path, "w", encoding="utf-8") as file:
            for task in tasks:
                data = task.data.model_dump(mode="json", exclude_defaults=True)
                row = {"prompt": prompt_of(task.data), "task": data, "data_source": env.config.taskset.id}
                file.write(json.dumps(row) + "\n")
    # Tasksets download data and read files.
    except (Exception, SystemExit) as error:
        if isinstance(error, _Unusable):
            raise
        raise _Unusable(f"has tasks that cannot be loaded: {_line(error)}") from error


def prompt_of(data: Foreign) -> list[dict[str, str]]:
    """Return the task's first messages as text."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if not isinstance(data.prompt, list):
        return [*system, {"role": "user", "content": data.prompt or _NO_PROMPT}]
    own = [{"role": one.role, "content": one.content} for one in data.prompt if isinstance(one.content, str)]
    return own if own and len(own) == len(data.prompt) else [*system, {"role": "user", "content": data.prompt_text}]


async def play(env: Foreign, channel: socket.socket) -> None:
    """Answer each line with a task by one with its reward, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=_MOST_BYTES)

    def send(**answer: object) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")

    access = json.loads(await reader.readline())
    os.environ[_KEY] = access["key"]
    async with env.serving():
        send(ready=True)
        while line := await reader.readline():
            send(**await _outcome(env, json.loads(line), access))
            await writer.drain()


async def _outcome(env: Foreign, row: Mapping[str, Foreign], access: Mapping[str, str]) -> dict[str, object]:
    """Play an episode, and return its reward, or a failure that completes "the environment failed: ..."."""
    import verifiers.v1 as vf

    kind = type(env.taskset).task_type()
    try:
        task = kind(kind.data_type().model_validate(row["task"]), env.config.taskset.task)
    except (KeyError, ValueError) as error:
        return {"failure": f"the row has no task of this environment: {_line(error)}"}
    client = vf.EvalClientConfig(base_url=access["url"], api_key_var=_KEY)
    context = vf.ModelContext(model=access["model"], client=client, sampling=vf.SamplingConfig())
    episode = await env.run_episode(task, context)
    if not episode.ok:
        found = [error for one in (*episode.traces, episode) for error in one.errors]
        return {"failure": f"{found[-1].type}: {found[-1].message}" if found else "the episode did not complete"}
    if len(episode.traces) != 1:
        return {"failure": f"an episode had {len(episode.traces)} agents, and only one can be trained"}
    rewards = episode.traces[0].rewards
    return {"reward": episode.traces[0].reward if any(one is not None for one in rewards.values()) else None}


def _harness_module(vf: ModuleType) -> ModuleType:
    """Return a module with a harness like `null` of verifiers: a chat with the task's tools.

    Runs in this process, without the interpreter that verifiers would install with uv for each episode.
    """
    from openai import AsyncOpenAI, BadRequestError
    from verifiers.v1.dialects.chat import message_to_wire

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined, misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Foreign,
            trace: Foreign,
            runtime: Foreign,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Foreign,
        ) -> Foreign:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            first = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
            messages += map(message_to_wire, first)
            async with AsyncExitStack() as stack:
                client: Foreign = await stack.enter_async_context(
                    AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
                )
                tools = await _tools(mcp_urls, stack)
                more = {"tools": [tool["schema"] for tool in tools.values()]} if tools else {}
                while True:
                    try:
                        answer = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
                    except BadRequestError as error:
                        # The rubric then scores the episode so far, as at limits of verifiers.
                        if any(limit in str(error) for limit in _LIMITS):
                            break
                        raise
                    message = answer.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        content = await _call(tools, call.function.name, call.function.arguments)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(_HARNESS)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module


async def _tools(urls: Mapping[str, str], stack: AsyncExitStack) -> dict[str, dict[str, Foreign]]:
    """Connect to MCP servers, and return their tools by the names that verifiers gives them."""
    from mcp import Client  # type: ignore[attr-defined]

    tools: dict[str, dict[str, Foreign]] = {}
    for server, url in urls.items():
        client = await stack.enter_async_context(Client(url))
        for tool in (await client.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = {"type": "function", "function": function}
            tools[name] = {"schema": schema, "client": client, "name": tool.name}
    return tools


async def _call(tools: Mapping[str, Mapping[str, Foreign]], name: str, arguments: str) -> str:
    """Call a tool, and return its text."""
    if name not in tools:
        return f"error: unknown tool {name!r}"
    result = await tools[name]["client"].call_tool(tools[name]["name"], json.loads(arguments or "{}"))
    return _text(result.content)


def _text(blocks: Iterable[Foreign]) -> str:
    return "\n".join(block.text if block.type == "text" else str(block) for block in blocks)


def _line(error: BaseException) -> str:
    """Return an error in one line. Of pydantic's validation errors, return the first one."""
    if hasattr(error, "errors"):
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first.get("type") == "extra_forbidden":
            return f"there is no setting {name}"
        return f"{name}: {first['msg']}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
