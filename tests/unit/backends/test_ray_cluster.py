"""Errors when Ray is started on unsuitable machines."""

import pytest

from rlhf_cli.backends.cluster.ray_cluster import _join_or_start, ray_cluster
from rlhf_cli.errors import RunError, UsageError


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_too_deep_for_sockets_is_named(tmp_path, monkeypatch, variable):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(deep))
    with pytest.raises(UsageError, match=f"^{variable}={deep}: too long .* set RAY_TMPDIR to a shorter folder"):
        ray_cluster().__enter__()
    assert not list(deep.rglob("*.sock*"))


@pytest.mark.parametrize(("num_failures", "num_calls"), [(1, 2), (2, 2)])
def test_a_start_that_ray_gave_up_is_tried_once_more_and_then_named(num_failures, num_calls):
    calls: list[None] = []

    def init() -> None:
        calls.append(None)
        if len(calls) <= num_failures:
            raise Exception("The current node timed out during startup. This could happen because some of the Ray ...")

    if num_failures < num_calls:
        _join_or_start(init, address=None)
    else:
        with pytest.raises(RunError, match=r"^Ray's processes did not start in time, 2 times in a row: the machine is"):
            _join_or_start(init, address=None)
    assert len(calls) == num_calls


def test_another_failure_of_ray_is_not_repeated():
    def init() -> None:
        raise Exception("something else")

    with pytest.raises(Exception, match="something else"):
        _join_or_start(init, address=None)


def test_a_cluster_that_does_not_answer_may_want_a_token():
    def init() -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    with pytest.raises(UsageError, match=r"^RAY_ADDRESS=10.0.0.1:6379: .* with a token, set RAY_AUTH_MODE=token$"):
        _join_or_start(init, address="10.0.0.1:6379")
