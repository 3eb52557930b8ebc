"""Dialogues of agent programs are cached, one per list of tools."""

from agent_fakes import dialogues_of


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def test_equal_tools_have_the_same_dialogue_and_few_are_kept():
    dialogues, _ = dialogues_of("Qwen 2.5")
    first, plain = dialogues.of([tool("a")]), dialogues.of(())
    assert dialogues.of([dict(reversed(tool("a").items()))]) is first
    assert dialogues.of([tool("b")]) is not first
    for number in range(62):
        dialogues.of([tool(f"tool_{number}")])
        assert dialogues.of(()) is plain  # the most frequent case
    assert dialogues.of([tool("a")]) is not first
