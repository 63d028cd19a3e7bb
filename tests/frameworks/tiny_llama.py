"""A tiny Llama and batches for it, under frameworks that step a loop of one's own."""

import torch
import transformers

VOCAB_SIZE, HIDDEN_SIZE, STEPS, ACCUMULATE = 97, 32, 6, 2


def tiny(tied=False):
    """The same weights at each call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 48}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=tied)
    )


def batches(count=4, rows=2, context=10):
    """Batches of one size whose labels have holes of different sizes, so that no mean is another's."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        ids = torch.randint(VOCAB_SIZE, (rows, context), generator=generator)
        labels = ids.clone()
        labels[:, : index % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made
