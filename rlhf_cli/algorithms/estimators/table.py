"""Table of advantage estimators; no other module branches on an estimator's name.

A row declares what an estimator requires (a critic, a group of responses, a greedy response per prompt) and how it
computes advantages. Each command's defaults select a row; the KL placement and the policy loss are separate settings.
"""

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.algorithms.estimators.gae import PPO
from rlhf_cli.algorithms.estimators.gigpo import GIGPO
from rlhf_cli.algorithms.estimators.group import GDPO, GRPO, GRPO_DPO, GRPO_MAXRL, GRPO_PASSK
from rlhf_cli.algorithms.estimators.reinforce import REINFORCE, REINFORCE_GROUP
from rlhf_cli.algorithms.estimators.remax import REMAX
from rlhf_cli.algorithms.estimators.rloo import RLOO

# The run identity stores the name: renaming an estimator makes its existing checkpoints refuse to resume.
_GROUP = (GRPO, GRPO_PASSK, GRPO_MAXRL, GRPO_DPO, GDPO, GIGPO)
ROWS = (PPO, REINFORCE, REINFORCE_GROUP, *_GROUP, RLOO, REMAX, Estimator("gkd"))

ESTIMATORS = {row.name: row for row in ROWS}
