"""SmolLM2-135M-Instruct out of its GGUF file, and real text for it."""

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(folder):
    """The model in float32 (tied, 49152 tokens), and its tokenizer."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # The loaded model calls itself quantised, although its weights are float32.
    config = copy.deepcopy(loaded.config)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def texts(tokenizer, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of this project's own pages."""
    root = Path(__file__).parents[2]
    names = ("alerts", "concepts", "groups", "guarantees", "math", "operations")
    ids = tokenizer("\n".join((root / "docs" / f"{name}.md").read_text() for name in names))["input_ids"]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]
