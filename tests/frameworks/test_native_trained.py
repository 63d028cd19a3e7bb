"""Trained heads in the steps of torchtitan's Trainer, Automodel's functions and Megatron-Core's optimizer, beside them without."""

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny_llama
import torch
import torchtitan.trainer
from nemo_automodel.components.checkpoint.stateful_wrappers import ModelState, OptimizerState
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss, prepare_lm_weight
from nemo_automodel.components.training.model_output_utils import get_final_hidden_states
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
from torch.distributed import checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig, default_adamw

import headwater
from headwater import megatron
from headwater.nemo import RemoteLinearCrossEntropy
from headwater.torchtitan import HeadwaterLoss

ENVIRONMENTS = ("native",)

VOCAB_SIZE, HIDDEN_SIZE, STEPS, ACCUMULATE, MAX_NORM = 97, 32, 10, 2, 0.5
ADAMW = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """A process group, which checkpoints of both frameworks ask for."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def close(first, second, tolerance=1e-5):
    assert len(first) == len(second) > 0
    assert torch.allclose(torch.tensor(first), torch.tensor(second), rtol=0, atol=tolerance), (first, second)


def equal_parameters(first, second):
    # AdamW makes a step of a gradient that is rounding alone; the losses are compared at 1e-5.
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-4), name


def batches(steps):
    """Two micro-batches a step, whose labels have holes of different sizes."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(steps * ACCUMULATE):
        ids, labels = torch.randint(VOCAB_SIZE, (2, 2, 8), generator=generator)
        labels[:, : index % 5] = -100
        made.append(({"input": ids}, labels))
    return made


def test_two_ranks_train_as_one(server, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("rank_layer.py")), server.address, str(tmp_path)]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen(command, env={**place, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    written = json.loads((tmp_path / "losses.json").read_text())
    close(written["plain"], written["ours"])
    assert written["gap"] < 1e-4
    assert "FSDP" in written["refused"]


# ---- torchtitan -----------------------------------------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """The parts of torchtitan's Decoder that matter to a loss: its parts' names, and that it can leave out the layer."""

    _skip_lm_head = False

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers = torch.nn.Sequential(torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE), torch.nn.GELU())
        self.norm = torch.nn.RMSNorm(HIDDEN_SIZE)
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        torch.nn.init.normal_(self.lm_head.weight, std=0.3)
        if tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens):
        hidden = self.norm(self.layers(self.tok_embeddings(tokens)))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


class Titan(torchtitan.trainer.Trainer):
    """torchtitan's Trainer with the steps of its own, of parts that are made as it makes them; the whole one asks for a GPU."""

    def __init__(self, model, loss, folder=None, optimizer=None):
        self.config = types.SimpleNamespace(training=types.SimpleNamespace(disable_cuda_graphs=True, max_norm=MAX_NORM))
        self.parallel_dims = types.SimpleNamespace(
            pp_enabled=False, dp_enabled=False, dp_cp_enabled=False, ep_enabled=False, get_optional_mesh=lambda _: None
        )
        self.losses, self.norms = [], []
        self.metrics_processor = types.SimpleNamespace(should_log=lambda _: True, log=self._log, ntokens_since_last_log=0)
        self.device, self.model_config, self.model_parts = torch.device("cpu"), None, [model]
        self.parallel_dims.cp_enabled = False
        self.config.parallelism = types.SimpleNamespace(spmd_backend="default")
        self.train_context, self.fwd_bwd_fn = torch.enable_grad, self._forward_backward_body
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = ACCUMULATE, 1
        self.step = self.ntokens_seen = 0
        self.loss_fn = loss.build(compile_config=None)
        if isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        settings = default_adamw(**ADAMW) if optimizer is None else optimizer
        settings.implementation = "for-loop"
        self.optimizers = settings.build(model_parts=self.model_parts)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=20)
        self.checkpointer = CheckpointManager.Config(
            enable=folder is not None, interval=4, keep_latest_k=0, last_save_model_only=False
        ).build(
            dataloader=None,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def _log(self, step, average, maximum, norm, extra_metrics):
        self.losses.append(average)
        self.norms.append(norm)

    def run(self, last):
        self.checkpointer.load()
        data = iter(batches(last)[self.step * ACCUMULATE :])
        while self.step < last:
            self.step += 1
            self.train_step(data)
            self.checkpointer.save(self.step, last_step=False)
        return self


def titan_loss(server, head, **options):
    return HeadwaterLoss.Config(server=server.address, head=head, options=options)


@pytest.mark.parametrize("kind", ["served", "tied", "torch"])
def test_torchtitan_trains_as_without(server, kind):
    stock = Titan(Decoder(kind == "tied"), CrossEntropyLoss.Config()).run(STEPS)
    assert stock.norms[0] > MAX_NORM  # it clips
    options = {"optimizer": "torch"} if kind == "torch" else {}
    ours = Titan(Decoder(kind == "tied"), titan_loss(server, f"titan-{kind}", **options)).run(STEPS)
    try:
        assert ours.loss_fn._layer.trained.remote.served == (kind == "served")
        close(stock.losses, ours.losses)
        close(stock.norms, ours.norms, 1e-4)
    finally:
        ours.loss_fn.detach()
    equal_parameters(stock.model_parts[0], ours.model_parts[0])
    # The functions are torchtitan's again, and other trainings continue.
    close(stock.losses, Titan(Decoder(kind == "tied"), CrossEntropyLoss.Config()).run(STEPS).losses)


def test_torchtitan_resumes_from_its_checkpoint(server, tmp_path):
    stock = Titan(Decoder(), CrossEntropyLoss.Config()).run(STEPS)
    ours = Titan(Decoder(), titan_loss(server, "titan-resumed"), tmp_path).run(6)
    layer, head = ours.model_parts[0].lm_head, ours.loss_fn._layer.trained.remote.head
    assert head.step == 6
    assert torch.equal(ours.model_parts[0].state_dict()["lm_head.weight"], torch.from_numpy(head.weight()))
    before = layer.weight.detach().clone()
    ours.train_step(iter(batches(7)[12:]))  # past the checkpoint, and then it is killed
    ours.loss_fn._layer.trained.joint.close()
    assert torch.equal(before, layer.weight)
    again = Titan(Decoder(), titan_loss(server, "titan-resumed"), tmp_path).run(STEPS)
    again.loss_fn.detach()
    close(stock.losses[4:], again.losses)
    equal_parameters(stock.model_parts[0], again.model_parts[0])
    # The saved state is whole: without a head it continues from the trained weight.
    plain = Titan(Decoder(), CrossEntropyLoss.Config(), tmp_path)
    plain.checkpointer.load(8)
    plain.train_step(iter(batches(9)[16:]))
    close(stock.losses[8:9], plain.losses)


def test_torchtitan_refuses_two_optimizers(server):
    kinds = {"layers": "Adam", ".*": "AdamW"}
    groups = [ParamGroupConfig(pattern=key, optimizer_name=name, optimizer_kwargs=dict(ADAMW)) for key, name in kinds.items()]
    settings = OptimizersContainer.Config(param_groups=groups)
    ours = Titan(Decoder(), titan_loss(server, "titan-two"), optimizer=settings)
    with pytest.raises(headwater.InvalidArgumentError, match="optimizer"):
        ours.run(1)
    ours.loss_fn.detach()


# ---- NeMo Automodel -------------------------------------------------------------------------------------------------


class Finetune:
    """The steps of Automodel's recipe by the functions that it calls; its module asks for another Triton than this PyTorch has."""

    def __init__(self, model, loss_fn):
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def loss(self, ids, labels, tokens):
        options = {"lm_weight": None}
        if isinstance(self.loss_fn, LinearCrossEntropy):
            out = self.model(ids, logits_to_keep=1, output_hidden_states=True)
            options = {"lm_weight": prepare_lm_weight(self.loss_fn, self.model), "grad_reduce_group": None}
        else:
            out = self.model(ids)
        hidden = get_final_hidden_states(out)
        given = {"labels": labels, "model": self.model, "hidden_states": hidden, "num_label_tokens": tokens, **options}
        return calculate_loss(self.loss_fn, logits=out.logits, **given)

    def run(self, first, last):
        losses, norms = [], []
        for step in range(first, last):
            own = batches(last)[step * ACCUMULATE : (step + 1) * ACCUMULATE]
            tokens = sum(int((labels != -100).sum()) for _, labels in own)
            losses.append(0.0)
            for inputs, labels in own:
                loss = self.loss(inputs["input"], labels, tokens)
                losses[-1] += loss.item()
                loss.backward()
            norm = scale_grads_and_clip_grad_norm(MAX_NORM, [self.model], num_label_tokens=tokens, dp_group_size=1)
            norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses, norms


def test_automodel_trains_and_resumes_as_without(server, tmp_path):
    stock = Finetune(tiny_llama.tiny(), MaskedCrossEntropy())
    expected = stock.run(0, STEPS)
    assert expected[1][0] > MAX_NORM

    def make():
        return RemoteLinearCrossEntropy(server=server.address, head="automodel-trained")

    ours = Finetune(tiny_llama.tiny(), make())
    first = ours.run(0, 4)
    close(expected[0][:4], first[0])
    close(expected[1][:4], first[1], 1e-4)
    model, optimizer = ours.model, ours.optimizer
    state = {"model": ModelState(model), "optim": OptimizerState(model, optimizer, ours.scheduler)}
    dcp.save(state, checkpoint_id=tmp_path)
    assert model.lm_head.weight not in optimizer.state  # no moments of it stay here
    ours.run(4, 5)
    ours.loss_fn._layer.trained.joint.close()

    again = Finetune(tiny_llama.tiny(), make())
    model, optimizer = again.model, again.optimizer
    dcp.load({"model": ModelState(model), "optim": OptimizerState(model, optimizer, again.scheduler)}, checkpoint_id=tmp_path)
    rest = again.run(4, STEPS)
    close(expected[0][4:], rest[0])
    close(expected[1][4:], rest[1], 1e-4)
    again.loss_fn.detach()
    equal_parameters(stock.model, model)


# ---- Megatron-Core --------------------------------------------------------------------------------------------------


class Part:
    """As a Float16OptimizerWithFloat16Params or FP32Optimizer of Megatron-Core 0.19: main gradients, a scale of the loss."""

    is_stub_optimizer = False

    def __init__(self, optimizer, config, scaler):
        self.optimizer, self.config, self.grad_scaler = optimizer, config, scaler

    def get_parameters(self):
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def prepare_grads(self):
        found = False
        for parameter in self.get_parameters():
            parameter.grad = parameter.main_grad
            if self.grad_scaler:
                parameter.grad /= self.grad_scaler.scale
                found |= not bool(parameter.grad.isfinite().all())
        if self.grad_scaler:
            self.grad_scaler.update(found)
        return found

    def step_with_ready_grads(self):
        self.optimizer.step()
        return True


class ChainedOptimizer:
    """The steps of Megatron-Core 0.19's ChainedOptimizer, by the methods that it publishes."""

    def __init__(self, parts):
        self.chained_optimizers, self.config = parts, parts[0].config

    @property
    def param_groups(self):
        return [group for part in self.chained_optimizers for group in part.optimizer.param_groups]

    def get_loss_scale(self):
        scaler = self.chained_optimizers[0].grad_scaler
        return scaler.scale if scaler else torch.ones(1)

    def zero_grad(self, set_to_none=True):
        for part in self.chained_optimizers:
            part.optimizer.zero_grad(set_to_none)

    def prepare_grads(self):
        found = [part.prepare_grads() for part in self.chained_optimizers]
        return any(found)

    def get_grad_norm(self):
        grads = [parameter.grad for part in self.chained_optimizers for parameter in part.get_parameters()]
        return torch.nn.utils.get_total_norm(grads).item()

    def step_with_ready_grads(self):
        done = [part.step_with_ready_grads() for part in self.chained_optimizers]
        return all(done)

    def step(self):
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        for part in self.chained_optimizers:
            for parameter in part.get_parameters():
                parameter.grad *= min(1.0, part.config.clip_grad / (norm + 1e-6))
        skip = norm > self.config.grad_norm_skip_threshold
        return (not skip and self.step_with_ready_grads()), norm, None


class Scaler:
    """As DynamicGradScaler, to which each step is reported before it is made."""

    def __init__(self, scale):
        self.scale, self.told = torch.tensor([scale]), []

    def update(self, found):
        self.told.append(found)
        if found:
            self.scale = self.scale / 2


class Gpt:
    """Trains a Decoder as Megatron trains a GPTModel: gradients are added up in `main_grad`, and the loss is divided before."""

    def __init__(self, context=None, scaler=None, skip_above=float("inf")):
        self.model, self.context = Decoder(), context
        self.model._skip_lm_head = context is not None
        self.model.lm_head.requires_grad_(context is None)
        self.config = types.SimpleNamespace(
            optimizer="adam", decoupled_weight_decay=True, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.1,
            clip_grad=MAX_NORM, grad_norm_skip_threshold=skip_above,
        )  # fmt: skip
        named = [[*self.model.layers.parameters(), *self.model.norm.parameters()]]
        named.append([parameter for parameter in self.model.parameters() if not any(parameter is other for other in named[0])])
        held = [[parameter for parameter in part if parameter.requires_grad] for part in named]
        self.optimizer = ChainedOptimizer([Part(torch.optim.AdamW(part, **ADAMW), self.config, scaler) for part in held])
        self.losses, self.norms, self.applied = [], [], []

    def loss(self, ids, labels):
        if self.context is None:
            logits = self.model(ids).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
        return megatron.output_processor(
            hidden_states=self.model(ids).transpose(0, 1),
            output_layer=self.model.lm_head,
            output_weight=None,
            labels=labels,
            context=self.context,
            config=types.SimpleNamespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        )

    def run(self, first, last):
        for step in range(first, last):
            trained = [parameter for part in self.optimizer.chained_optimizers for parameter in part.get_parameters()]
            for parameter in trained:
                parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
            self.losses.append(0.0)
            for inputs, labels in batches(last)[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
                loss = self.loss(inputs["input"], labels).sum() / (labels != -100).sum() / ACCUMULATE
                self.losses[-1] += loss.item()
                (loss * self.optimizer.get_loss_scale()).sum().backward()
                for parameter in trained:
                    parameter.main_grad += parameter.grad
                    parameter.grad = None
            for group in self.optimizer.param_groups:
                group["lr"] = ADAMW["lr"] * (1 - step / 20)
            applied, norm, _ = self.optimizer.step()
            self.norms.append(norm)
            self.applied.append(applied)
        return self


def context_of(server, head, **options):
    return megatron.Context(server=server.address, head=head, trainable=True, **options)


@pytest.mark.parametrize("scale", [None, 256.0])
def test_megatron_trains_as_without(server, scale):
    def scaler():
        return Scaler(scale) if scale else None

    stock = Gpt(scaler=scaler()).run(0, STEPS)
    assert stock.norms[0] > MAX_NORM
    del stock.optimizer  # one trains in a process
    ours = Gpt(context_of(server, "megatron-trained" if scale is None else "megatron-scaled"), scaler()).run(0, STEPS)
    ours.context.detach()
    close(stock.losses, ours.losses)
    close(stock.norms, ours.norms, 1e-4)
    equal_parameters(stock.model, ours.model)


def test_megatron_skips_a_step_jointly(server):
    ours = Gpt(context_of(server, "megatron-skipped"), skip_above=1e-3)
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    ours.run(0, 2)
    assert ours.applied == [False, False]
    head = ours.context.trained.remote.head
    assert head.step == 2 and ours.context.trained.joint.skipped == 2
    ours.context.detach()
    for old, new in zip(before, ours.model.parameters(), strict=True):
        assert torch.equal(old, new)
    del ours.optimizer
    # An overflow of the head alone is reported to the scaler, and the body does not move either.
    scaler = Scaler(256.0)
    ours = Gpt(context_of(server, "megatron-overflowed"), scaler)
    ours.run(0, 1)
    before = [parameter.detach().clone() for parameter in ours.model.layers.parameters()]
    ours.context.trained.joint._seals_are_finite = lambda: False
    ours.run(1, 2)
    assert ours.applied == [True, False] and scaler.scale.item() == 64.0
    assert all(torch.equal(old, new) for old, new in zip(before, ours.model.layers.parameters(), strict=True))
    ours.context.detach()


def test_megatron_resumes_and_refuses(server):
    stock = Gpt().run(0, STEPS)
    del stock.optimizer
    ours = Gpt(context_of(server, "megatron-resumed")).run(0, 4)
    parts = ours.optimizer.chained_optimizers
    saved = [part.optimizer.state_dict() for part in parts], ours.model.state_dict()
    saved = torch.utils._pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, saved)
    ours.run(4, 5)
    ours.context.trained.joint.close()
    del ours, parts
    again = Gpt(context_of(server, "megatron-resumed"))
    for part, state in zip(again.optimizer.chained_optimizers, saved[0], strict=True):
        part.optimizer.load_state_dict(state)
    again.model.load_state_dict(saved[1])
    close(stock.losses[4:], again.run(4, STEPS).losses)
    again.context.detach()
    equal_parameters(stock.model, again.model)
    del again.optimizer

    layout = {"tensor_model_parallel_size": 1}
    layer = Decoder().lm_head
    given = {"hidden_states": torch.zeros(8, 2, HIDDEN_SIZE), "output_layer": layer, "labels": torch.zeros(2, 8, dtype=torch.long)}
    for option, value in (
        ("pipeline_model_parallel_size", 2),
        ("calculate_per_token_loss", True),
        ("mtp_num_layers", 1),
        ("share_embeddings_and_output_weights", True),
        ("output_layer", True),  # whose weight is not frozen
    ):
        shared = layer.weight if option == "share_embeddings_and_output_weights" else None
        config = types.SimpleNamespace(**layout, **{option: value})
        with pytest.raises(headwater.InvalidArgumentError, match=option):
            megatron.output_processor(**given, output_weight=shared, context=context_of(server, "refused"), config=config)
