"""Tensors on a GPU, and PyTorch's own GradScaler around the remote loss."""

import pytest
import torch
import torch.nn.functional as F
from torch_model import check_gradients, check_step, numbers, with_ignored

import headwater
import headwater.torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_outputs_and_their_gradients_on_the_gpu_are_those_of_fp64(head, problem, rng):
    factors = [numbers(rng, 16) for _ in range(3)]
    targets = with_ignored(problem.targets)

    def objective(hidden, logits):
        log_p, valid = logits.log_softmax(-1), targets != -100
        rows = F.cross_entropy(logits, targets, reduction="none"), -(log_p.exp() * log_p).sum(-1), logits.logsumexp(-1)
        return sum((factor.double() * row * valid).sum() for factor, row in zip(factors, rows, strict=True))

    expected, _ = problem.reference(objective)
    trunk = torch.nn.Parameter(problem.trunk.cuda())
    torch.backends.cuda.matmul.allow_tf32 = False
    loss_fn = headwater.torch.CrossEntropyLoss(
        head, reduction="none", outputs=("argmax",), differentiable=("loss", "entropy", "lse")
    )
    out = loss_fn(problem.inputs.cuda() @ trunk.T, targets.cuda())
    assert all(value.device.type == "cuda" for value in out if value is not None)
    torch.autograd.backward((out.loss, out.entropy, out.lse), [factor.cuda() for factor in factors])
    check_gradients(trunk.grad.cpu(), head, expected)


def test_the_real_grad_scaler_overflows_and_recovers(head, problem):
    """Steps of docs/api.md's recipe, until one is not skipped."""
    trunk = torch.nn.Parameter(problem.trunk.cuda())
    optimizer = torch.optim.SGD([trunk], lr=0.1)
    make_scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    scaler = make_scaler(init_scale=2.0**26)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    inputs, targets = problem.inputs.cuda(), problem.targets.cuda()
    skipped = 0
    while True:
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss_fn((inputs @ trunk.T).half(), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            break
        head.discard_gradient()
        skipped += 1
        assert skipped < 30
    head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=loss_fn.micro_batches, gradient_factor=1 / scale)
    assert 2 <= skipped == head.step - 1
    check_step(problem, head, trunk, tolerance=2e-3)


def test_activation_checkpointing_on_the_gpu(new_head, problem):
    # Backward of CUDA graphs runs in a thread of its own: the recomputation must be known there too.
    gradients = []
    for reentrant in (None, True, False):
        head = new_head()
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


# ---- how CUDA tensors travel --------------------------------------------------------------------------------------------


@pytest.fixture
def wide(rng):
    """Hidden states and targets on the GPU, large enough for everything that is done with large ones."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    hidden = torch.randn(1024, 1024, generator=generator).cuda()
    return hidden, torch.randint(0, 200, (1024,), generator=generator).cuda()


def weight(seed=5):
    """A weight for such rows."""
    return torch.randn(200, 1024, generator=torch.Generator().manual_seed(seed)) / 32


def answers_of(client, make_head, wide, dtype):
    """What a head answers about CUDA tensors, in all ways that concern their memory."""
    hidden, targets = wide[0].to(dtype), wide[1]
    head = make_head(client, weight(), staging_slots=1, optimizer=headwater.SGD())
    teacher = make_head(client, weight(6), trainable=False)
    ignored = torch.where(torch.arange(1024, device="cuda") % 3 == 0, targets, -100)
    into = torch.full_like(hidden, torch.nan)
    first = head.cross_entropy(hidden, targets, micro_batch=0)
    outs = [
        first,
        head.cross_entropy(hidden, ignored, micro_batch=1),
        head.cross_entropy(hidden, targets, micro_batch=2, grad_hidden_out=into),
        head.jsd(hidden, teacher, hidden.flip(0), micro_batch=3, commit="explicit"),
        head.jsd_future(hidden, teacher, hidden.flip(0), micro_batch=4).result(60),
        # Rows that are a part of a larger allocation, and rows that are not contiguous.
        head.cross_entropy(hidden[7:77], targets[7:77], micro_batch=5),
        head.cross_entropy(hidden[::2], targets[::2], micro_batch=6),
    ]
    assert outs[2].grad_hidden is into and not outs[3].commit(0.5)
    assert all(out.grad_hidden.is_cuda and out.grad_hidden.dtype == dtype for out in outs)
    values = [torch.tensor(out.loss_sum) for out in outs] + [out.grad_hidden.cpu() for out in outs]
    return first.transport, [*values, torch.tensor(head.gradient())]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_every_path_of_cuda_tensors_answers_alike(sharing, make_head, wide, dtype):
    taken, answers = {}, {}
    for transport in ("auto", "grpc", "shared_memory"):
        with headwater.connect(sharing.address, transport=transport) as client:
            taken[transport], answers[transport] = answers_of(client, make_head, wide, dtype)
            on_device = client.server_info().engine == "cuda"
            if transport == "auto" and on_device:
                assert client.transports()["cuda_ipc"] is None and client.transport_note == ""
    best = "cuda_ipc" if on_device else "shared_memory"
    assert taken == {"auto": best, "grpc": "grpc", "shared_memory": "shared_memory"}
    for transport in ("grpc", "shared_memory"):
        for ours, theirs in zip(answers[transport], answers["auto"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("transport", ("auto", "grpc"))
def test_the_current_stream_is_waited_for(sharing, make_head, wide, transport):
    """Rows that a busy stream has still to write are read after that, also by a future; its later work comes after the gradient."""
    hidden, targets = wide
    with headwater.connect(sharing.address, transport=transport) as client:
        head = make_head(client, weight())
        expected = head.cross_entropy(hidden, targets, micro_batch=0)
        stream = torch.cuda.Stream()
        for index, future in enumerate((False, True), start=1):
            rows = torch.zeros_like(hidden)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)  # about a tenth of a second
                rows.copy_(hidden, non_blocking=True)
                if future:
                    out = head.cross_entropy_future(rows, targets, micro_batch=index).result(60)
                else:
                    out = head.cross_entropy(rows, targets, micro_batch=index)
                doubled = out.grad_hidden * 2
            stream.synchronize()
            assert out.loss_sum == expected.loss_sum
            torch.testing.assert_close(doubled, expected.grad_hidden * 2, rtol=0, atol=0)


def test_memory_that_torch_gives_out_again_is_read_anew(sharing, make_head, wide):
    """Allocations come and go at the same addresses: what was learned of one must not be taken for the next."""
    hidden, targets = wide
    with headwater.connect(sharing.address) as client:
        head = make_head(client, weight())
        expected = head.cross_entropy(hidden, targets, backward=False).loss_sum
        for size in (1, 3, 1, 2):
            other = torch.zeros(size, 1024, 1024, device="cuda")
            other[-1] = hidden
            assert head.cross_entropy(other[-1], targets, backward=False).loss_sum == expected
            del other
            torch.cuda.empty_cache()


def test_tensors_in_page_locked_memory(sharing, make_head, wide):
    hidden, targets = wide[0].cpu(), wide[1].cpu()
    with headwater.connect(sharing.address) as client:
        head = make_head(client, weight())
        expected = head.cross_entropy(hidden, targets, micro_batch=0)
        into = torch.empty_like(hidden).pin_memory()
        out = head.cross_entropy(hidden.pin_memory(), targets, micro_batch=1, grad_hidden_out=into)
        assert out.loss_sum == expected.loss_sum and torch.equal(into, expected.grad_hidden)


def test_a_teacher_streams_cuda_tensors(sharing, make_head, wide):
    hidden, _ = wide
    with headwater.connect(sharing.address) as client:
        student, teacher = make_head(client, weight(1)), make_head(client, weight(0), trainable=False)
        expected = student.jsd(hidden, teacher, hidden, backward=False).loss_sum
        assert client.teacher("cuda", total_rows=1024).stream(hidden) == 1024
        joined = student.jsd(hidden, teacher, headwater.JOIN, join_key="cuda", total_rows=1024, micro_batch=0)
        assert joined.loss_sum == expected
