"""Other implementations of a micro-batch: ways to loss, grad_hidden and grad_weight, and the forms in which they leave grad_weight.

Works: `anew` writes a bf16 gradient and adds nothing; `bf16` adds into a bf16 `.grad`; `fp32` adds into an fp32 `main_grad`, as
Headwater does. A way by autograd adds into `main_grad` in a pass of its own, as training frameworks do. A way whose name ends with
`_addmm` or `_direct` adds as cheaply as its kernels allow.
"""

import importlib
import importlib.util
import math

import torch
import torch.nn.functional as F

WORKS = ("anew", "bf16", "fp32")


class Part:
    """A micro-batch."""

    def __init__(self, hidden, targets, teacher_hidden):
        self.hidden = hidden.requires_grad_()
        self.targets = targets
        self.teacher_hidden = teacher_hidden


class Problem:
    """The rows of a step, the weight, and where its gradient goes."""

    def __init__(self, hidden, weight, targets, micro_batches=1, teacher=None, beta=0.5):
        self.weight = weight.requires_grad_()
        self.teacher_weight = None if teacher is None else teacher[1]
        self.beta = beta
        count = len(hidden) // micro_batches
        self.parts = []
        for start in range(0, len(hidden), count):
            rows = slice(start, start + count)
            self.parts.append(Part(hidden[rows].clone(), targets[rows], None if teacher is None else teacher[0][rows]))
        self.main_grad = None

    def forget(self):
        """No gradient is held any more."""
        self.weight.grad = self.main_grad = None
        for part in self.parts:
            part.hidden.grad = None

    def prepare(self, work):
        """Gradients of zeros, as an accumulating step finds them."""
        self.forget()
        if work == "fp32":
            self.main_grad = torch.zeros(self.weight.shape, device=self.weight.device)
        elif work == "bf16":
            self.weight.grad = torch.zeros_like(self.weight)

    def new_bytes(self, work):
        """Bytes of the gradients that a step makes: those of the rows, and of the weight where nothing is added to."""
        made = [part.hidden.grad for part in self.parts] + ([self.weight.grad] if work == "anew" else [])
        return sum(tensor.numel() * tensor.element_size() for tensor in made)

    def gradient(self):
        """grad_weight, wherever the last work left it."""
        return self.weight.grad if self.main_grad is None else self.main_grad


def log_mixture(log_p, log_q, beta):
    """log(beta p + (1 - beta) q), 0 < beta < 1."""
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def derivative(logits, teacher_logits, targets, beta=0.5):
    """(sum of the losses, its derivative by the logits); the divergence is the generalized JSD at `beta`, between 0 and 1.

    logits: [rows, vocab]; teacher_logits: the same, or None for the cross entropy; targets: int64 [rows]. In fp32, or fp64 for fp64
    logits; the derivative has the logits' type.
    """
    precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_q = F.log_softmax(logits.to(precision), dim=-1)
    if teacher_logits is None:
        losses = -log_q.gather(1, targets[:, None]).sum()
        columns = torch.arange(logits.shape[1], device=logits.device)
        return losses, (log_q.exp() - (columns == targets[:, None]).to(precision)).to(logits.dtype)
    log_p = F.log_softmax(teacher_logits.to(precision), dim=-1)
    log_m = log_mixture(log_p, log_q, beta)
    q, ratio = log_q.exp(), log_q - log_m
    reverse = (q * ratio).sum(-1, keepdim=True)
    losses = beta * (log_p.exp() * (log_p - log_m)).sum() + (1 - beta) * reverse.sum()
    return losses, ((1 - beta) * q * (ratio - reverse)).to(logits.dtype)


def reference(problem, rows, ids, precision):
    """(loss, grad_hidden of the first `rows`, grad_weight of `ids`) of the first micro-batch, in `precision` from bf16 inputs."""
    part, block = problem.parts[0], 1024
    weight = problem.weight.detach().to(precision)
    teacher_weight = None if problem.teacher_weight is None else problem.teacher_weight.to(precision)
    loss, grad_hidden, grad_weight = 0.0, [], 0.0
    for start in range(0, len(part.hidden), block):
        chunk = slice(start, start + block)
        hidden = part.hidden.detach()[chunk].to(precision)
        teacher_logits = None if teacher_weight is None else part.teacher_hidden[chunk].to(precision) @ teacher_weight.T
        value, gradient = derivative(hidden @ weight.T, teacher_logits, part.targets[chunk], problem.beta)
        loss += value.item()
        if start < rows:
            grad_hidden.append(gradient[: rows - start] @ weight)
        grad_weight = grad_weight + gradient[:, ids].T @ hidden
    return loss, torch.cat(grad_hidden), grad_weight


def eager_loss(hidden, weight, targets, teacher_hidden, teacher_weight, beta=0.5):
    """The textbook's loss: logits in fp32, summed over the rows."""
    logits = F.linear(hidden, weight).float()
    if teacher_hidden is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    log_q = F.log_softmax(logits, dim=-1)
    with torch.no_grad():
        log_p = F.log_softmax(F.linear(teacher_hidden, teacher_weight).float(), dim=-1)
    log_m = log_mixture(log_p, log_q, beta)
    forward = F.kl_div(log_m, log_p, reduction="sum", log_target=True)
    reverse = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return beta * forward + (1 - beta) * reverse


def member(package, module, name):
    """A member of a package's module by its name, or None, saying why."""
    if importlib.util.find_spec(package) is None:
        print(f"{package} is not installed", flush=True)
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever importing another library raises
        print(f"{module} has no {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def by_autograd(loss):
    """A micro-batch's computation from a function of its hidden states, the weight and the part."""

    def compute(problem, part, work, first):
        part.hidden.grad = None
        if work != "bf16" or first:
            problem.weight.grad = None
        value = loss(part.hidden, problem.weight, part)
        value.backward()
        if work == "fp32":
            if first:
                problem.main_grad.copy_(problem.weight.grad)
            else:
                problem.main_grad.add_(problem.weight.grad)
            problem.weight.grad = None
        return value

    return compute


def add_product(main_grad, left, right, first):
    """main_grad += left right, or = for a step's first micro-batch, in place: one product, which adds in fp32."""
    if main_grad.device.type == "cpu":
        torch.addmm(main_grad, left.float(), right.float(), beta=0 if first else 1, out=main_grad)
    elif first:
        torch.mm(left, right, out_dtype=torch.float32, out=main_grad)
    else:
        torch.addmm(main_grad, left, right, out_dtype=torch.float32, out=main_grad)


def by_row_pass(row_pass):
    """Three or four plain products and a pass over bf16 logits, of which the last adds into main_grad."""

    def compute(problem, part, work, first):
        with torch.no_grad():
            teacher = None if part.teacher_hidden is None else part.teacher_hidden @ problem.teacher_weight.T
            value, gradient = row_pass(part.hidden @ problem.weight.T, teacher, part.targets, problem.beta)
            del teacher
            part.hidden.grad = gradient @ problem.weight
            add_product(problem.main_grad, gradient.T, part.hidden, first)
        return value

    return compute


def by_liger_forward(forward):
    """Liger's Hopper kernels up to the derivative of the logits, and a product that adds into main_grad."""

    def compute(problem, part, work, first):
        with torch.no_grad():
            value, part.hidden.grad, gradient, *_ = forward(
                part.hidden.detach(), problem.weight.detach(), part.targets, reduction="sum", defer_dw=True
            )
            add_product(problem.main_grad, gradient.T, part.hidden, first)
        return value

    return compute


def by_quack_forward(forward, chunk, padding):
    """QuACK's pipeline, whose gradient of the weight is fp32 before it is rounded, added as it is."""

    def compute(problem, part, work, first):
        with torch.no_grad():
            losses, gradient_of_rows, gradient = forward(
                *padded(part.hidden.detach(), part, padding, problem.weight.detach()), chunk
            )
            part.hidden.grad = gradient_of_rows[: len(part.hidden)]
            if first:
                problem.main_grad = gradient
            else:
                problem.main_grad.add_(gradient)
            return losses.sum()

    return compute


def padded(hidden, part, padding, weight):
    """Hidden states, weight and targets, with so many ignored rows behind the others."""
    if padding == 0:
        return hidden, weight, part.targets
    return F.pad(hidden, (0, 0, 0, padding)), weight, F.pad(part.targets, (0, padding), value=-100)


def quack_loss(function, chunk, padding, scaled, tuned):
    """A configuration of QuACK's loss."""

    def loss(hidden, weight, part):
        inputs = padded(hidden, part, padding, weight)
        return function(*inputs, chunk_size=chunk, reduction="sum", tuned=tuned, use_scaled_exp=scaled)

    return loss


def quack_chunks(rows, width):
    """(chunk, padding) pairs. QuACK 0.6.5 fails where a chunk has as many rows as the hidden states have columns: pad that one."""
    return [(rows + 128, 128) if rows == width else (rows, 0)] + [
        (chunk, 0) for chunk in (4096, 2048) if chunk < rows and chunk != width
    ]


def quack_configurations(function, chunks, tuned):
    """name -> loss: both pipelines in each of the chunks; the base pipeline also with its search, if that is wanted."""
    found = {}
    for chunk, padding in chunks:
        found[f"scaled_{chunk}"] = quack_loss(function, chunk, padding, True, False)
        found[f"base_{chunk}"] = quack_loss(function, chunk, padding, False, False)
        if tuned:
            found[f"base_{chunk}_tuned"] = quack_loss(function, chunk, padding, False, True)
    return found


def compiled(function, options):
    """For these shapes only, as a training loop would have it."""
    return torch.compile(function, dynamic=False) if options.compile else function


def ways_of(problem, options):
    """name -> (works, computation of a micro-batch, or {configuration: such}, of which the fastest is meant)."""

    def eager(hidden, weight, part):
        return eager_loss(hidden, weight, part.targets, part.teacher_hidden, problem.teacher_weight, problem.beta)

    compiled_loss = compiled(eager_loss, options)

    def by_compiler(hidden, weight, part):
        return compiled_loss(hidden, weight, part.targets, part.teacher_hidden, problem.teacher_weight, problem.beta)

    ways = {
        "torch_compile": (WORKS, by_autograd(by_compiler)),
        "torch_compile_addmm": (("fp32",), by_row_pass(compiled(derivative, options))),
    }
    if not options.compile or options.ways:  # slower than the compiled one: only by its name
        ways["torch_eager"] = (WORKS, by_autograd(eager))
    # Slow ways are measured in the lightest work only.
    lightest = ("anew",) if len(problem.parts) == 1 else ()
    if problem.teacher_weight is not None:
        chunked = member("liger_kernel", "liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")
        if chunked is not None:
            loss = chunked(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=problem.beta)
            ways["liger_chunked"] = (
                lightest,
                by_autograd(lambda h, w, part: loss(h, w, part.teacher_hidden, problem.teacher_weight, part.targets)),
            )
        return ways
    sm90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    function = member("liger_kernel", sm90, "LigerFusedLinearCrossEntropySM90Function")
    if function is not None:
        ways["liger_sm90"] = (WORKS, by_autograd(lambda h, w, part: function.apply(h, w, part.targets, -100, "sum")))
        forward = member("liger_kernel", sm90, "fused_linear_cross_entropy_forward_sm90")
        ways["liger_sm90_addmm"] = (("fp32",), by_liger_forward(forward))
    quack = member("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    if quack is not None:
        chunks = quack_chunks(*problem.parts[0].hidden.shape)
        found = quack_configurations(quack, chunks, options.tuned)
        ways["quack"] = (WORKS, {name: by_autograd(loss) for name, loss in found.items()})
        forward = member("quack", "quack.linear_cross_entropy", "scaled_exp_linear_cross_entropy_fwd")
        direct = {f"scaled_{chunk}": by_quack_forward(forward, chunk, padding) for chunk, padding in chunks}
        ways["quack_direct"] = (("fp32",), direct)
    cut = member("cut_cross_entropy", "cut_cross_entropy", "linear_cross_entropy")
    if cut is not None:
        ways["cce"] = (lightest, by_autograd(lambda h, w, part: cut(h, w, part.targets, reduction="sum")))
        ways["cce_unfiltered"] = (
            lightest,
            by_autograd(lambda h, w, part: cut(h, w, part.targets, reduction="sum", filter_eps=None)),
        )
    triton = member("liger_kernel", "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
    if triton is not None:
        liger = triton(reduction="sum", accum_dtype=torch.float32)
        ways["liger"] = (lightest, by_autograd(lambda h, w, part: liger(w, h, part.targets)))
    return ways
