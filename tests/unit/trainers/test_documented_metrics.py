"""Every metric of the offline objectives is documented on its command's page; test_online_repeats has the online
ones.
"""

import pytest
from preference_training import STEPS, TASKS, run_steps
from site_hooks import undocumented
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, train

from rlhf_cli.algorithms.kto import finish_kto_metrics
from rlhf_cli.algorithms.process_reward import finish_step_metrics
from rlhf_cli.trainers.offline.rm import finish_reward_metrics

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize(
    ("task", "command", "finish"),
    [
        ("rm", "rm", finish_reward_metrics),
        ("prm", "prm", finish_step_metrics),
        ("dpo", "dpo", dict),
        ("kto", "kto", finish_kto_metrics),
    ],
)
def test_every_metric_of_a_step_on_preferences_is_on_the_page_of_its_command(task, command, finish, tiny_model_dir):
    trained = run_steps(tiny_model_dir, TASKS[task](), 0, Layout(), steps=STEPS[:1])
    assert not undocumented(command, finish(trained.metrics[0]))


def test_every_metric_of_a_step_of_sft_is_on_its_page(tiny_model_dir):
    engine = make_engine(load_policy(tiny_model_dir, 0)[1], 0)
    (metrics,) = train(engine, Items(make_sequences(3)), [[0, 1, 2]], Layout())
    assert not undocumented("sft", metrics)
