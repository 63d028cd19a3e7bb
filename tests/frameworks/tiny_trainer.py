"""A tiny model, its data, and Trainers that differ in nothing but where the last layer is.

stock, model = train()
curve, model = train(config=HeadwaterConfig(client=client, head="a"))
assert curve.losses == approx(stock.losses, abs=1e-5)
"""

import copy
import os
import tempfile
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from headwater.transformers import setup_trainer

VOCABULARY = 97
STEPS = 12
ON_GPU = os.environ.get("HEADWATER_TEST_ENGINE") == "cuda"  # the Trainers, and their servers


def tiny_model(tied: bool = False, **options):
    """The same weights at each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.1, **options}
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config))


def examples(count: int = 64, length: int = 16, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences whose first labels, another number of each, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length // 2, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder, **options) -> TrainingArguments:
    """Accumulation 2, clipping that is active, a cosine schedule, float32, on one device."""
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": not ON_GPU,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    made = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    made._n_gpu = min(made.n_gpu, 1)  # not DataParallel, which a Trainer takes where it finds several GPUs
    return made


@dataclass
class Curve:
    """The figures that a Trainer has logged."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    evaluation: float

    def gap(self, other: "Curve") -> float:
        """Largest difference of a loss; NaN if one is."""
        pairs = zip([*self.losses, self.evaluation], [*other.losses, other.evaluation], strict=True)
        return max((abs(a - b) for a, b in pairs), key=lambda gap: gap if gap == gap else float("inf"))


def curve_of(trainer: Trainer) -> Curve:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    evaluation = trainer.evaluate()["eval_loss"]
    return Curve(*([log.get(name, 0.0) for log in logs] for name in ("loss", "grad_norm", "learning_rate")), evaluation)


def make_trainer(folder, model=None, config=None, trainer_class=Trainer, **options) -> Trainer:
    """A Trainer, with the head of `config` if there is one. Options of TrainingArguments and of Trainer may be mixed."""
    of_trainer = {name: options.pop(name) for name in tuple(options) if name in _OF_TRAINER}
    data = {"train_dataset": examples(), "eval_dataset": examples(8, seed=1), **of_trainer}
    trainer = trainer_class(model=model if model is not None else tiny_model(), args=arguments(folder, **options), **data)
    trainer.remove_callback(_printer())
    if config is not None:
        setup_trainer(trainer, config)
    return trainer


_OF_TRAINER = (
    "train_dataset",
    "eval_dataset",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "compute_loss_func",
    "data_collator",
    "model_init",
)


def _printer():
    from transformers import PrinterCallback

    return PrinterCallback


def train(model=None, config=None, resume=None, folder=None, **options):
    """Trains; returns the curve and the model."""
    with tempfile.TemporaryDirectory() as temporary:
        trainer = make_trainer(folder or temporary, model, config, **options)
        trainer.train(resume_from_checkpoint=resume)
        return curve_of(trainer), trainer.model


def gap_of_weights(model, other) -> float:
    """Largest difference of an element between two models of the same names."""
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return max(float((first[name].float().cpu() - second[name].float().cpu()).abs().max()) for name in first)


def copy_of(model):
    return copy.deepcopy(model)
