"""Starting Ray on machines on which it cannot run."""

import pytest

from rlhf_cli.backends.cluster.ray_cluster import ray_cluster
from rlhf_cli.errors import UsageError


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
