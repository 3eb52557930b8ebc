"""Environment of verifiers with a tool."""

import verifiers.v1 as vf

from vf_lookup.tool import LookupToolset

__all__ = ["LookupTaskset"]


class LookupData(vf.TaskData):
    answer: str


class LookupConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupTask(vf.Task[LookupData, vf.State, LookupConfig]):
    @classmethod
    def toolsets(cls, config: LookupConfig) -> list[vf.Toolset]:
        return [LookupToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class LookupTasksetConfig(vf.TasksetConfig):
    task: LookupConfig = LookupConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupTasksetConfig]):
    def load(self) -> list[LookupTask]:
        data = LookupData(prompt="Where is the key?", system_prompt="Use the tool.", answer="attic")
        return [LookupTask(data, self.config.task)]
