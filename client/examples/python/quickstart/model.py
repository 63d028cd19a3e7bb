"""The body of a small transformer language model: everything but the head."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class BodyConfig:
    """Sizes of a body."""

    vocab_size: int
    hidden_size: int
    layers: int
    attention_heads: int
    context: int


TEACHER = {"hidden_size": 96, "layers": 2, "attention_heads": 4}
STUDENT = {"hidden_size": 48, "layers": 1, "attention_heads": 2}


def as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16, the gradient on its way back too, as mixed-precision training rounds the stream between blocks.

    Rounding matters because the same run on another number of threads then differs as real runs do. Sums that differ by one bit of
    fp32 now and then fall on two sides of a rounding boundary. All in fp32, two runs differ by little more than the last bit of the
    loss, too little to compare with.
    """
    return x.bfloat16().float()


class Body(nn.Module):
    """Token ids [batch, context] to the hidden states that go to the head, [batch * context, hidden_size], after the final norm."""

    def __init__(self, config: BodyConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = config.hidden_size
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, size)
        self.position_embedding = nn.Embedding(config.context, size)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(size, config.attention_heads, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(config.layers)
        )
        future = torch.full((config.context, config.context), -math.inf).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.final_norm = nn.LayerNorm(size)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = as_bfloat16(self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]])
        for block in self.blocks:
            x = as_bfloat16(block(x, self.future[: ids.shape[1], : ids.shape[1]]))
        return as_bfloat16(self.final_norm(x)).view(-1, x.shape[-1])
