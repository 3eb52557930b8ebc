"""Environment of verifiers with one turn and two rewards."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply.split())

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 4)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 4


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            data = SumsData(prompt=f"{number}+{number}=", answer=str(2 * number), name=f"sum {number}")
            yield SumsTask(data, self.config.task)
