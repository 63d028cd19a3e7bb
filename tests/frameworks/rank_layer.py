"""One of two ranks that train a layer's head under FSDP2, as torchtitan shards: `rank_layer.py ADDRESS FOLDER`.

Its norm and its last layer are one unit of FSDP2, and the last layer is not run. Rank 0 writes `losses.json`.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import headwater
from headwater.torch._layer_head import LayerHead
from headwater.torch._remote_head import HeadwaterConfig
from headwater.torch._trained_layer import train_with_holder

VOCAB_SIZE, HIDDEN_SIZE, STEPS, MAX_NORM, RANKS = 97, 32, 4, 0.5, 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layer = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.norm = torch.nn.RMSNorm(HIDDEN_SIZE)
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        torch.nn.init.normal_(self.lm_head.weight, std=0.3)

    def forward(self, ids):
        return self.norm(self.layer(self.embeddings(ids)).tanh())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(VOCAB_SIZE, (2, RANKS, 8), generator=generator)
    labels[0, :3] = -100
    return ids, labels


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def plain():
    """The losses of one rank without a head."""
    model, losses = Model(), []
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        ids, labels = batch(step)
        logits = model.lm_head(model(ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def sharded(address, rank):
    """The losses of two ranks with one, and the weight that the model saves then."""
    model, losses = Model(), []
    for unit in (model.embeddings, model.layer, [model.norm, model.lm_head], model):
        fully_shard(unit)
    for module in model.modules():
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    optimizer = make_optimizer(model)
    head = LayerHead(
        HeadwaterConfig(server=address, head="layer"), lambda *given: train_with_holder(*given, gradient_factor=1 / RANKS)
    )
    for step in range(STEPS):
        ids, labels = batch(step)
        mine = labels[rank : rank + 1]
        loss = head.loss(model.lm_head.weight, None, model(ids[rank : rank + 1]), mine, (labels != -100).sum())
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append(total.item())
        (loss * RANKS).backward()  # FSDP averages, as Automodel has it
        parameters = list(model.parameters())

        def clip(max_norm, parameters=parameters):
            norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            return norm

        head.trained.clip(parameters, MAX_NORM, clip)
        optimizer.step()
        optimizer.zero_grad()
    weight = model.state_dict()["lm_head.weight"].full_tensor()
    optimizer.state_dict()  # the head's checkpoint is written, by rank 0 alone
    head.detach()
    return losses, weight


def tied(address):
    """Why a tied layer that FSDP shards is refused."""
    model = Model()
    model.embeddings.weight = model.lm_head.weight
    for unit in ([model.embeddings, model.norm, model.lm_head], model):
        fully_shard(unit)
    optimizer = make_optimizer(model)
    head = LayerHead(HeadwaterConfig(server=address, head="tied"), lambda *given: train_with_holder(*given, gradient_factor=1.0))
    ids, labels = batch(0)
    try:
        head.loss(model.lm_head.weight, None, model(ids), labels, None)
    except headwater.InvalidArgumentError as error:
        return str(error)
    optimizer.step()
    return "nothing was refused"


if __name__ == "__main__":
    address, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    losses, weight = sharded(address, rank)
    expected, model = plain()
    refused = tied(address)
    gap = (weight - model.lm_head.weight).abs().max().item()
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps({"ours": losses, "plain": expected, "gap": gap, "refused": refused}))
    distributed.destroy_process_group()
