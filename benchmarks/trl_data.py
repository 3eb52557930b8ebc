"""How long TRL takes from a file to the rows that SFTTrainer trains, for data_speed.py, which has TRL on its path.

    python trl_data.py SPEC.json

Prints nothing: seconds, tokens and trained tokens are written to the file that the specification names.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

NOT_TRAINED = -100


class TimedSFT(SFTTrainer):
    """Counts the seconds of the preparation, without the construction of a trainer."""

    seconds: float

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Dataset:
        start = time.perf_counter()
        rows = super()._prepare_dataset(*args, **kwargs)
        self.seconds = time.perf_counter() - start
        return rows


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    disable_progress_bars()
    settings = SFTConfig(
        output_dir=spec["output"],
        report_to="none",
        use_cpu=True,
        max_length=spec["max_length"],
        dataset_num_proc=spec["num_proc"],
    )
    start = time.perf_counter()
    rows = load_dataset("json", data_files=spec["rows"], split="train")
    reading = time.perf_counter() - start
    trainer = TimedSFT(
        AutoModelForCausalLM.from_pretrained(spec["model"]),
        args=settings,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
    )
    batches = trainer.train_dataset.select_columns("labels").with_format("numpy").iter(batch_size=1000)
    labels = [row for batch in batches for row in batch["labels"]]
    result = {
        "seconds": reading + trainer.seconds,
        "tokens": sum(row.size for row in labels),
        "trained": int(sum(np.count_nonzero(row != NOT_TRAINED) for row in labels)),
    }
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
