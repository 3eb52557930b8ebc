"""The records of a sample's way, from a row to the loss: few, in few files, each with an example."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = {
    "Row": "data/reading/sources.py",
    "Prompt": "data/prompts.py",
    "GenerationRequest": "data/rollouts.py",
    "Generation": "data/rollouts.py",
    "ScoreRequest": "rewards/records.py",
    "Score": "rewards/records.py",
    "Sample": "trainers/online/samples.py",
    "Rollout": "trainers/online/samples.py",
    "Experience": "algorithms/estimators/estimator.py",
    "TokenSequence": "data/packing/packs.py",
    "MicroBatch": "data/packing/packs.py",
    "PolicyColumns": "algorithms/policy_loss.py",
}
WITH_LOGPROBS = {"Generation", "Rollout", "PolicyColumns"}
"""Classes with log-probs as fields; `TokenSequence` and `MicroBatch` have them as columns."""
ON_THE_WAY = (
    "data/rollouts.py",
    "data/packing",
    "trainers/online",
    "algorithms/objective.py",
    "algorithms/policy_loss.py",
)


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name."""
    nodes = ast.parse(path.read_text()).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(("name", "path"), RECORDS.items())
def test_a_record_has_an_example(name, path):
    assert "Example" in (ast.get_docstring(classes(ROOT / "rlhf_cli" / path)[name]) or "")


def test_the_page_of_the_architecture_shows_all_records():
    page = (ROOT / "docs" / "architecture" / "index.md").read_text()
    diagram = page.split("## The path of a sample")[1].split("```")[1]
    assert set(re.findall(r"\b[A-Z]\w+", diagram)) == set(RECORDS)


def test_no_other_record_holds_log_probs():
    files = [file for path in ON_THE_WAY for file in sorted((ROOT / "rlhf_cli" / path).rglob("*.py"))]
    files += [ROOT / "rlhf_cli" / path for path in ON_THE_WAY if path.endswith(".py")]
    found = {
        name
        for file in files
        for name, record in classes(file).items()
        for field in record.body
        if isinstance(field, ast.AnnAssign) and re.search(r"logprobs|rollout_K|old_K", ast.unparse(field.target))
    }
    assert found == WITH_LOGPROBS
