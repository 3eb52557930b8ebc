"""Model for `rlhf generate` and `rlhf eval`: a full model, or a merged adapter or checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from rlhf_cli.config.model import ModelSource
from rlhf_cli.models.classifiers import refuse_classifier
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.saving import PROCESSOR_FILES
from rlhf_cli.models.tokenizers import TOKENIZER_FILES, load_tokenizer, read_tokenizer
from rlhf_cli.runs.model_export import Parts, configuration, find_parts, read_back, whole_weights, write_whole


@dataclass(frozen=True)
class InferenceModel:
    """A language model before loading. `parts` is set if engines cannot load the model directly."""

    source: ModelSource
    found: FoundModel
    tokenizer: object
    parts: Parts | None = None

    @property
    def architecture(self) -> PretrainedConfig:
        """Hugging Face configuration of the full model."""
        return self.found.architecture

    def fingerprint(self) -> str:
        """Hash the weights, to detect a folder overwritten by a later run."""
        return self.found.fingerprint() if self.parts is None else self.parts.fingerprint()

    @contextmanager
    def whole(self, folder: Path, *, tell: Callable[[str], None]) -> Iterator[str]:
        """Yield the path for the engines: the model itself, or `folder` with the merged model."""
        if self.parts is None:
            yield self.found.path
            return
        tell(f"Merging {self.source.pretrain} for the engines into {folder}, which is removed afterwards")
        # Fails if the folder exists, which `prepare_folder` has removed.
        folder.mkdir(parents=True)
        try:
            trust = self.source.trust_remote_code
            write_whole(self.parts, self.architecture, folder, trust_remote_code=trust)
            # An engine may randomly initialize a missing weight, so check that all exist.
            read_back(folder, self.architecture, device_map="meta", trust_remote_code=trust)
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def find_inference_model(source: ModelSource) -> InferenceModel:
    """Find the model. Raises UsageError if it is not a language model."""
    parts = find_parts(source.pretrain, flag="--pretrain")
    if parts is None:
        found = InferenceModel(source, find_model(source), load_tokenizer(source))
    else:
        architecture = configuration(parts, trust_remote_code=source.trust_remote_code)
        described = parts.file(TOKENIZER_FILES) or parts.description
        processor = parts.file(PROCESSOR_FILES)
        whole = FoundModel(str(processor) if processor else source.pretrain, architecture)
        found = InferenceModel(source, whole, read_tokenizer(str(described), source), parts)
        whole_weights(parts, architecture, trust_remote_code=source.trust_remote_code)  # report mismatches now
    refuse_classifier(found.architecture, f"--pretrain {source.pretrain!r}")
    return found
