"""Tensors on a GPU, and PyTorch's own GradScaler around the remote loss."""

import pytest
import torch
import torch.nn.functional as F
from test_torch_data_parallel import scaled_step
from torch_model import Problem, check_gradients, relative

import headwater.torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_cuda_tensors_come_back_as_cuda_tensors(one_shard, make_head, rng, dtype):
    problem = Problem(rng)
    head = problem.head(one_shard.client, make_head)
    hidden = (problem.inputs @ problem.trunk.T).to("cuda", dtype)
    out = head.cross_entropy(hidden, problem.targets.cuda(), micro_batch=0)
    assert out.grad_hidden.device == hidden.device and out.grad_hidden.dtype == dtype


def test_gradients_on_the_gpu_are_those_of_fp64(one_shard, make_head, rng):
    problem = Problem(rng)
    expected, _ = problem.reference(lambda hidden, logits: F.cross_entropy(logits, problem.targets))
    head = problem.head(one_shard.client, make_head)
    trunk = torch.nn.Parameter(problem.trunk.cuda())
    torch.backends.cuda.matmul.allow_tf32 = False
    loss = headwater.torch.CrossEntropyLoss(head)(problem.inputs.cuda() @ trunk.T, problem.targets.cuda())
    loss.backward()
    assert loss.device.type == "cuda"
    check_gradients(trunk.grad.cpu(), head, expected)


def test_the_real_grad_scaler_overflows_and_recovers(one_shard, make_head, rng):
    problem = Problem(rng)
    head = problem.head(one_shard.client, make_head)
    trunk = torch.nn.Parameter(problem.trunk.cuda())
    optimizer = torch.optim.SGD([trunk], lr=0.1)
    make_scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    scaler = make_scaler(init_scale=2.0**26)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    inputs = problem.inputs.cuda()
    skipped = []
    while not skipped or skipped[-1]:
        skipped.append(scaled_step(scaler, optimizer, loss_fn, lambda: (inputs @ trunk.T).half(), problem.targets.cuda()))
        assert len(skipped) < 30
    assert len(skipped) >= 3 and head.step == len(skipped)
    expected, _ = problem.reference(lambda hidden, logits: F.cross_entropy(logits, problem.targets))
    assert relative(problem.weight - torch.tensor(head.weight()), 0.1 * expected[1]) <= 2e-3
    assert relative((problem.trunk - trunk.detach().cpu()), 0.1 * expected[0]) <= 2e-3


def test_activation_checkpointing_on_the_gpu(one_shard, make_head, rng):
    # Backward of CUDA graphs runs in a thread of its own: the recomputation must be known there too.
    problem = Problem(rng)
    gradients = []
    for reentrant in (None, True, False):
        head = problem.head(one_shard.client, make_head)
        loss_fn = headwater.torch.CrossEntropyLoss(head)
        trunk = torch.nn.Parameter(problem.trunk.cuda())
        inputs = problem.inputs.cuda().requires_grad_()

        def run(tensor, trunk=trunk, loss_fn=loss_fn):
            return loss_fn(torch.tanh(tensor @ trunk.T), problem.targets.cuda())

        loss = run(inputs) if reentrant is None else torch.utils.checkpoint.checkpoint(run, inputs, use_reentrant=reentrant)
        loss.backward()
        assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
        gradients.append(torch.tensor(head.gradient()))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
