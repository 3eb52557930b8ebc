"""Row data used by a run's rewards in addition to the prompt."""

from dataclasses import dataclass

from rlhf_cli.config.plugins import called_name
from rlhf_cli.config.row_rewards import DATA_SOURCE, verifier_of
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.reading.sources import Row


@dataclass(frozen=True, slots=True)
class Judges:
    """Inputs of a run's rewards: `names` are verifiers for all rows; `key` is the column for `by_row`."""

    names: tuple[str, ...]
    key: str
    own_sources: dict[str, str] | None
    keeps_rows: bool

    @classmethod
    def of(cls, reward: RewardConfig | None) -> "Judges":
        """Return the judges for these settings."""
        if reward is None:
            return cls((), DATA_SOURCE, None, keeps_rows=False)
        # Only verifiers compare with the label; other rewards read the response alone.
        verifiers = [call for call in reward.rewards if call.row.kind == "verifier" and not call.row.by_row]
        names = tuple(call.target or call.name for call in verifiers)
        own = reward.own_sources if reward.is_by_row else None
        return cls(names, reward.reward_key or DATA_SOURCE, own, keeps_rows=reward.reads_rows)

    def source_of(self, row: Row) -> str | None:
        """Return the row's source name."""
        value = row.get(self.key)
        return value if isinstance(value, str) else None

    def verifiers(self, row: Row) -> list[str]:
        """Return the verifiers that read the row's label."""
        source = self.source_of(row)
        named = verifier_of(source, self.own_sources) if source and self.own_sources is not None else None
        return [*self.names, *([called_name(named)] if named else [])]
