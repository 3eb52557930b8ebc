"""A tiny trained model as a run saves it, for tests that read run folders."""

import numpy as np
import torch
from tiny_training import Items, Layout, make_engine, make_sequences, partition, train

from rlhf_cli.backends.roles.saved_models import describe_model, save_whole_model
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.models.adapters import load_with_adapter, plan_adapter
from rlhf_cli.models.loading import load_causal_lm, load_value_backbone
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.tokenizers import load_tokenizer

TOKENS = torch.tensor([[5, 6, 7, 8, 250, 3, 3, 9]])


class Trained:
    """A tiny model after two steps as saved by a run: its folder, and a complete checkpoint."""

    def __init__(
        self,
        root,
        pretrain,
        *,
        stage=0,
        dtype="fp32",
        lora_rank=0,
        value=False,
        name="model",
        sequences=None,
        **others,
    ):
        """`others` are settings of the model or adapter."""
        of_model = {setting: value for setting, value in others.items() if setting in ModelConfig.model_fields}
        lora = {setting: value for setting, value in others.items() if setting not in of_model}
        config = ModelConfig(pretrain=str(pretrain), param_dtype=dtype, **of_model)
        tokenizer = load_tokenizer(config)
        adapter = LoraConfig(lora_rank=lora_rank, lora_alpha=8, **lora) if lora_rank else LoraConfig()
        plan = plan_adapter(config, adapter, seed=1)
        load = load_value_backbone if value else load_causal_lm
        self.hf_model = load_with_adapter(load, config, plan, partition=partition(stage, dtype=dtype))
        engine = make_engine(
            (ValueModel if value else PolicyModel)(self.hf_model), stage, dtype=dtype, learning_rate=0.02
        )
        if value:
            self.hf_model.config.reward_mean = 0.25  # as written by `rlhf rm`
            batches = [Layout().share().micro_batches(Items(make_sequences(6)), np.arange(6))[0] for _ in range(2)]
            for packs in batches:
                engine.train_step(packs, lambda model, batch: ((model(batch) - 1).square().mean(), {}))
        else:
            items = Items(sequences or make_sequences(6))
            train(engine, items, [range(len(items.sequences))] * 2, Layout())
        self.folder = root / "run" / "model"
        save_whole_model(engine, self.hf_model, tokenizer, self.folder)
        store = CheckpointStore(root / "run" / "checkpoints", max_num=3)
        with store.writing(2, {"identity": {}}, needed_bytes=0) as aside:
            (aside / name).mkdir()
            engine.save(aside / name)
            describe_model(self.hf_model, tokenizer, aside / name)
        self.checkpoint = store.path(2)

    def outputs(self):
        """Return the model's outputs in training mode, with padded attention instead of packs."""
        return outputs(self.hf_model)


def outputs(model):
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        result = model.eval()(input_ids=TOKENS)
    return result.logits.float()
