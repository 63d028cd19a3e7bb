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
    """Rounded to bfloat16, the gradient on its way back too: what mixed-precision training does to the stream between blocks.

    That matters here because the same run on another number of threads then differs as such runs do: sums that come out one bit of
    fp32 apart now and then fall on two sides of a rounding boundary. All in fp32, two runs differ by little more than the last bit
    of the loss, and there is nothing to compare a difference with.
    """
    return x.bfloat16().float()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.attention_heads
        self.attention_norm = nn.LayerNorm(size)
        self.query_key_value = nn.Linear(size, 3 * size)
        self.attention_out = nn.Linear(size, size)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, context, hidden_size], as the result
        batch, context, size = x.shape
        packed = self.query_key_value(self.attention_norm(x)).view(batch, context, 3, self.heads, size // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, context, size / heads]
        scores = query @ key.transpose(-1, -2) / math.sqrt(size // self.heads)
        attention = scores.masked_fill(self.future[:context, :context], -math.inf).softmax(-1)
        x = x + self.attention_out((attention @ value).transpose(1, 2).reshape(batch, context, size))
        return x + self.mlp(self.mlp_norm(x))


class Body(nn.Module):
    """Token ids [batch, context] to the hidden states that go to the head, [batch * context, hidden_size], after the final norm."""

    def __init__(self, config: BodyConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.context, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = as_bfloat16(self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]])
        for block in self.blocks:
            x = as_bfloat16(block(x))
        return as_bfloat16(self.final_norm(x)).view(-1, x.shape[-1])
