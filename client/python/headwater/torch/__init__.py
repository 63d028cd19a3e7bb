"""Losses for PyTorch's autograd over remote heads, and the loop around them.

    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="mean")
    loss = loss_fn(hidden, targets)          # the server computes the loss and both gradients, and holds its own back
    loss.backward()                          # tells the server the upstream gradient; fills hidden.grad
    optimizer.step()
    head.apply_optimizer_step(learning_rate=1e-3, expected_micro_batches=loss_fn.micro_batches)

The head's gradient never exists on this side. Every factor of the loss in backward reaches it too: a GradScaler's scale, a division
by accumulation steps, weights of several losses, a vector.

CUDA tensors on the server's host are read, and their gradients written, in place (`Client.transports`). Tensors in ordinary,
page-locked or `empty_rows` memory are handed over without a copy by this package.

`attach` makes a head of a model's last layer, tied to the embedding or not; `TrainingLoop` closes steps, keeps checkpoints and
finds back to them.
"""

from headwater._loss._micro_batches import MicroBatchSource as MicroBatchSource
from headwater._recovery import StateStore as StateStore
from headwater.torch._attach import ModuleHead as ModuleHead, attach as attach
from headwater.torch._losses import (
    CrossEntropyLoss as CrossEntropyLoss,
    JSDLoss as JSDLoss,
    LossOutputs as LossOutputs,
    cross_entropy as cross_entropy,
    jsd as jsd,
)
from headwater.torch._rows import empty_rows as empty_rows
from headwater.torch._trainer_state import TrainerState as TrainerState
from headwater.torch._training_loop import StepOutcome as StepOutcome, TrainingLoop as TrainingLoop
