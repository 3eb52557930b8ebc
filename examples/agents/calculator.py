"""An agent with a calculator, written for any OpenAI-compatible endpoint. It knows nothing of training.

It reads a row {"question": ..., "answer": ...} from its standard input, and writes its reward as its last line:

    rlhf grpo --agent_command "python examples/agents/calculator.py" --prompt_data tasks.jsonl ...
"""

import json
import sys

from openai import OpenAI

NUMBER = {"type": "integer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
        },
    }
]


def multiply(a: int, b: int) -> int:
    """Return the product."""
    return a * b


def main() -> None:
    """Answer one question and print the reward."""
    row = json.load(sys.stdin)
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": row["question"]}]
    while True:
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            try:
                result = str(multiply(**json.loads(call.function.arguments)))
            except TypeError as error:  # arguments that do not fit
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(json.dumps({"reward": float((message.content or "").strip() == str(row["answer"]))}))


main()
