"""The model of `rlhf generate` and `rlhf eval`: a whole one, or an adapter or checkpoint made whole."""

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
    """A language model before its weights are loaded; `parts` is set if engines cannot load the model as it is."""

    source: ModelSource
    found: FoundModel
    tokenizer: object
    parts: Parts | None = None

    @property
    def architecture(self) -> PretrainedConfig:
        """The Hugging Face configuration of the whole model."""
        return self.found.architecture

    def fingerprint(self) -> str:
        """Return a hash of the weights: it detects a folder that a later run has overwritten."""
        return self.found.fingerprint() if self.parts is None else self.parts.fingerprint()

    @contextmanager
    def whole(self, folder: Path, *, tell: Callable[[str], None]) -> Iterator[str]:
        """Yield the path that engines load: the model as it is, or `folder` with the whole model."""
        if self.parts is None:
            yield self.found.path
            return
        tell(f"Writing {self.source.pretrain} as a whole model for the engines, to {folder} while they run")
        folder.mkdir(parents=True)
        try:
            trust = self.source.trust_remote_code
            write_whole(self.parts, self.architecture, folder, trust_remote_code=trust)
            # an engine might make up a weight that it does not find
            read_back(folder, self.architecture, device_map="meta", trust_remote_code=trust)
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def find_inference_model(source: ModelSource) -> InferenceModel:
    """Return the model of the settings. Raise UsageError if it is no language model, or a model that gives scores."""
    parts = find_parts(source.pretrain, flag="--pretrain")
    if parts is None:
        found = InferenceModel(source, find_model(source), load_tokenizer(source))
    else:
        architecture = configuration(parts, trust_remote_code=source.trust_remote_code)
        described = parts.file(TOKENIZER_FILES) or parts.description
        processor = parts.file(PROCESSOR_FILES)
        whole = FoundModel(str(processor) if processor else source.pretrain, architecture)
        found = InferenceModel(source, whole, read_tokenizer(str(described), source), parts)
        whole_weights(parts, architecture, trust_remote_code=source.trust_remote_code)  # what does not fit is found now
    refuse_classifier(found.architecture, f"--pretrain {source.pretrain!r}")
    return found
