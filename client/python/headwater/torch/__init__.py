"""Losses for PyTorch's autograd over remote heads.

    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="mean")
    loss = loss_fn(hidden, targets)          # the server computes the loss and both gradients, and holds its own back
    loss.backward()                          # tells the server the upstream gradient; fills hidden.grad
    optimizer.step()
    head.apply_optimizer_step(learning_rate=1e-3, expected_micro_batches=loss_fn.micro_batches)

The head's gradient never exists on this side. Whatever reaches the loss in backward (a GradScaler's scale, a division by the number
of accumulation steps, weights of several losses) reaches it too, as the factor of the commit.
"""

from headwater.torch._losses import CrossEntropyLoss, JSDLoss, cross_entropy, jsd
from headwater.torch._micro_batches import MicroBatchSource

__all__ = ["CrossEntropyLoss", "JSDLoss", "MicroBatchSource", "cross_entropy", "jsd"]
