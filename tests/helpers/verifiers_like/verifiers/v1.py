"""The environment asks for one turn. Its reward is the reply's length, times the setting `taskset.factor`."""

import contextlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from urllib.request import Request, urlopen


class AgentConfig:
    harness = None
    model_fields_set = ()


class Data(SimpleNamespace):
    system_prompt = None

    @classmethod
    def model_validate(cls, values):
        if "prompt" not in values:
            raise ValueError("prompt is missing")
        return cls(**values)

    def model_dump(self, **_):
        return vars(self)


class Task:
    def __init__(self, data, config=None):
        self.data = data

    data_type = staticmethod(lambda: Data)


class Tasks(list):
    bounded = True


class Taskset:
    task_type = staticmethod(lambda: Task)

    def select(self, config):
        names = ("fine", "tells", "fails", "hangs", "dies", "unscored", "infinite", "two")
        return Tasks(Task(Data(prompt=name)) for name in names[: config.get("limit")])


class SelectConfig:
    model_validate = staticmethod(dict)


def env_config_type(name, env_id=""):
    if name == "absent":
        raise ModuleNotFoundError("taskset not found") from ModuleNotFoundError(f"No module {name!r}", name=name)
    if name == "broken":
        raise RuntimeError("two\nlines")
    roles = ("solver", "judge") if env_id == "pair" else ("solver",)
    return SimpleNamespace(model_fields={role: SimpleNamespace(default=AgentConfig()) for role in roles})


def default_harness_id(name):
    return name


def resolve_env_config(settings):
    return settings


class Env:
    taskset = Taskset()

    def __init__(self, settings):
        assert settings["solver"] == {"runtime": {"type": "subprocess"}}
        self.factor = settings["taskset"].get("factor", 1)
        self.config = SimpleNamespace(taskset=SimpleNamespace(id=settings["taskset"]["id"], task=None))

    @contextlib.asynccontextmanager
    async def serving(self):
        print("an environment may print")
        yield

    async def run_episode(self, task, context):
        kind = task.data.prompt
        reply = context.ask(kind)
        error = SimpleNamespace(type="TaskError", message="no such\nfile")
        rewards = {"length": len(reply)}
        if kind == "dies":
            print("the last words", file=sys.stderr)
            os._exit(3)
        if kind == "hangs":
            # As tool servers of verifiers, in a process group of its own.
            tool = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
            context.ask(str(tool.pid))
            time.sleep(100)
        reward = {"infinite": float("inf"), "tells": os.getpid()}.get(kind, len(reply) * self.factor)
        is_ok = kind != "fails"
        trace = SimpleNamespace(
            rewards={"length": None} if kind == "unscored" else rewards, reward=reward, errors=[] if is_ok else [error]
        )
        return SimpleNamespace(ok=is_ok, errors=[], traces=[trace] * (2 if kind == "two" else 1))


load_environment = Env


class ModelContext:
    def __init__(self, model, client, sampling):
        self.model, self.client = model, client

    def ask(self, text):
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": "Bearer " + os.environ[self.client.api_key_var], "Content-Type": "application/json"}
        request = Request(self.client.base_url + "/chat/completions", json.dumps(body).encode(), headers)
        with urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]


EvalClientConfig = SimpleNamespace
SamplingConfig = SimpleNamespace
