"""Environment of verifiers that answers the model's guesses as its user."""

import verifiers.v1 as vf

__all__ = ["HigherEnv", "HigherTaskset"]


class HigherData(vf.TaskData):
    number: int


class HigherTask(vf.Task[HigherData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.number))


class HigherTaskset(vf.Taskset[HigherTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number = number % 9 + 1
            yield HigherTask(HigherData(prompt="Guess a number from 1 to 9.", number=number), self.config.task)


class HigherEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherEnv(vf.Env[HigherEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply.strip() != str(task.data.number):
                guess = int(segment.last_reply) if segment.last_reply.strip().isdigit() else -1
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
