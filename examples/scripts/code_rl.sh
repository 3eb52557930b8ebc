#!/usr/bin/env bash
# GRPO on programming tasks: the reward is the share of the task's tests that the code in the answer passes.
#   1. writes twenty tiny tasks with tests (functions, programs with input and output, assertions)
#   2. grpo: runs the last ```python block of each answer in the sandbox (docs/sandbox.md)
#   3. eval: the model before and after on the same tasks, with several answers per task
# The few tasks show all parts; for real ones, set TASKS=FILE.jsonl with columns "prompt" and "label".
#
#   examples/scripts/code_rl.sh MODEL [OUTPUT]
#
# MODEL    folder, run, or Hugging Face name, such as Qwen/Qwen2.5-Coder-0.5B-Instruct
# OUTPUT   folder for tasks and runs (default runs/code_rl); earlier runs in it are resumed
#
# Environment variables, with defaults for a small model on one machine (large model in parentheses):
#   TASKS (none)  PROMPTS 10 per iteration (128)  GROUP 4 answers per task (16)  ITERATIONS 6 (300)
#   MAX_NEW_TOKENS 256 (4096)  MAX_LEN 512 (6144)  LEARNING_RATE 1e-5 (1e-6)  ENGINES 1 (number of GPUs)
#   FLAGS (more flags for both commands)
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [OUTPUT]}
OUTPUT=${2:-runs/code_rl}
TASKS=${TASKS:-$OUTPUT/tasks.jsonl}
PROMPTS=${PROMPTS:-10}
GROUP=${GROUP:-4}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-256}
MAX_LEN=${MAX_LEN:-512}

mkdir -p "$OUTPUT"
if [ ! -e "$TASKS" ]; then
  python3 - "$TASKS" <<'PYTHON'
import json
import sys

# A function with its arguments, what it returns in words and in Python, and arguments to test it with.
FUNCTIONS = [
    ("square(x)", "the square of x", "x * x", [[3], [0], [-4]]),
    ("larger(a, b)", "the larger of two numbers", "max(a, b)", [[1, 2], [5, -5], [7, 7]]),
    ("is_even(n)", "whether n is even", "n % 2 == 0", [[4], [7], [0]]),
    ("last(items)", "the last item of a list", "items[-1]", [[[1, 2, 3]], [["a"]], [[[], [0]]]]),
    ("total(items)", "the sum of a list of numbers", "sum(items)", [[[1, 2, 3]], [[]], [[-1, 1]]]),
    ("reverse(text)", "the text backwards", "text[::-1]", [["abc"], [""], ["noon"]]),
    ("vowels(text)", "the number of vowels (aeiou) in a text", "sum(map('aeiou'.count, text))", [["banana"], ["sky"]]),
    ("is_palindrome(text)", "whether a text reads the same backwards", "text == text[::-1]", [["noon"], ["nine"]]),
    ("unique(items)", "the sorted list of different items", "sorted(set(items))", [[[3, 1, 3]], [[]], [["b", "a"]]]),
    ("longest(words)", "the length of the longest word of a list", "max(map(len, words))", [[["a", "bcd"]], [["xy"]]]),
]
# What a program reads, in words and for its tests, and what it prints.
PROGRAMS = [
    ("two numbers in a line and prints their sum", [("1 2", "3"), ("-5 5", "0"), ("40 2", "42")]),
    ("a number n and prints the numbers from 1 to n, one in a line", [("3", "1\n2\n3"), ("1", "1")]),
    ("a line and prints it in capital letters", [("hello", "HELLO"), ("a b", "A B")]),
    ("a line and prints how many words it has", [("one two three", "3"), ("word", "1")]),
    ("a line of numbers and prints them sorted, in a line", [("3 1 2", "1 2 3"), ("10 9", "9 10")]),
]
# A function, what it returns, and assertions on it.
ASSERTIONS = [
    ("factorial(n)", "n!", ["assert factorial(0) == 1", "assert factorial(5) == 120"]),
    ("gcd(a, b)", "the greatest common divisor", ["assert gcd(12, 18) == 6", "assert gcd(7, 3) == 1"]),
    ("fibonacci(n)", "the n-th Fibonacci number, the 0-th being 0", ["assert fibonacci(1) == 1", "assert fibonacci(10) == 55"]),
    ("is_prime(n)", "whether n is prime", ["assert is_prime(2)", "assert not is_prime(9)", "assert is_prime(97)"]),
    ("flatten(lists)", "all items of a list of lists", ["assert flatten([[1], [2, 3]]) == [1, 2, 3]", "assert flatten([]) == []"]),
]
FUNCTION = "Write a Python function {} that returns {}. Answer with one ```python block."
PROGRAM = "Write a Python program that reads {}. Answer with one ```python block."

rows = []
for call, words, body, inputs in FUNCTIONS:
    name, _, names = call.rstrip(")").partition("(")
    outputs = [eval(f"lambda {names}: {body}")(*given) for given in inputs]
    label = {"fn_name": name, "inputs": inputs, "outputs": outputs}
    rows.append({"prompt": FUNCTION.format(call, words), "label": label})
for words, tests in PROGRAMS:
    inputs, outputs = map(list, zip(*tests))
    rows.append({"prompt": PROGRAM.format(words), "label": {"inputs": inputs, "outputs": outputs}})
rows += [{"prompt": FUNCTION.format(call, words), "label": tests} for call, words, tests in ASSERTIONS]
with open(sys.argv[1], "w") as file:
    for row in rows:
        print(json.dumps(row | {"label": json.dumps(row["label"])}), file=file)
PYTHON
fi

if [ ! -d "$OUTPUT/grpo/model" ]; then
  rlhf grpo --pretrain "$MODEL" --prompt_data "$TASKS" --reward_funcs "code(timeout=5, memory_mb=512)" \
    --output "$OUTPUT/grpo" --load_checkpoint --save_steps 5 --num_episodes 100 --max_iterations "${ITERATIONS:-6}" \
    --rollout_batch_size "$PROMPTS" --n_samples_per_prompt "$GROUP" --train_batch_size "$((PROMPTS * GROUP))" \
    --actor_learning_rate "${LEARNING_RATE:-1e-5}" --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" \
    --vllm_num_engines "${ENGINES:-1}" --colocate_all_models ${FLAGS:-}
fi

rlhf eval --pretrain "$MODEL,$OUTPUT/grpo" --prompt_data "$TASKS" --reward_funcs "code(timeout=5, memory_mb=512)" \
  --output "$OUTPUT/result" --load_checkpoint --n_samples_per_prompt "$GROUP" --temperature 1 \
  --max_new_tokens "$MAX_NEW_TOKENS" --max_len "$MAX_LEN" --vllm_num_engines "${ENGINES:-1}" ${FLAGS:-}
