"""What the training loop asks of a task."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Sequences with their answers.

    inputs    (member, batch, position, feature) float32
    targets   (member, batch, ...) what the loss compares with
    relevant  (member, batch, copies) int64: the positions that hold the answer, the true attention pattern
    """

    inputs: Tensor
    targets: Tensor
    relevant: Tensor
