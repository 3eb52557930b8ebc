"""Compare planned activations with the exact peak of live bytes on fake CUDA tensors, and count launches.

    python benchmarks/activations.py [PART_OF_A_NAME]... [--layers 0]

Prints the peak in forward and backward passes of one micro-batch above the weights, and the forecast of `rlhf plan`,
for published sizes, commands and adapters, with kept and recomputed layers. `--layers` limits the layers, and with them
the vocabulary. No GPU needed; takes minutes. Exits with 1 if a forecast is more than 20 % off.
"""

import sys
from pathlib import Path

from common import make_parser, table, versions

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from fake_cuda.start import run_fake
from registry import pinned, unpacked

LIMIT = 0.2
GIB = 2**30


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART_OF_A_NAME")
    parser.add_argument("--layers", type=int, default=0)
    args = parser.parse_args()
    packages = unpacked(*pinned("liger-kernel"), complete=True)
    results = run_fake("activations.py", str(args.layers), *args.parts, packages=packages)
    rows, is_near = [], True
    for name, found in results.items():
        difference = found["planned"] / found["exact"] - 1
        is_near &= abs(difference) <= LIMIT
        sizes = [f"{found[key] / GIB:.2f}" for key in ("exact", "planned")]
        rows.append([name, found["layers"], *sizes, f"{difference:+.0%}", f"{found['operators']:,}"])
    print(versions())
    print(table("case | layers | exact, GiB | planned | difference | launches", rows))
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
