"""The first large parallel calls of a process, made on numbers that nobody uses."""

from __future__ import annotations

import torch

# Large enough that PyTorch, and MKL below it, give every thread a part of the work; a few milliseconds each.
BATCH, ROWS, COLUMNS = 256, 64, 128


def warm_up() -> None:
    """Have every thread make its first exponential, logarithm, softmax and matrix products.

    On a Xeon with AVX-512 and AMX, the first forward pass of an LSH layer (seq 8192) was wrong in 13 of 110 fresh
    processes, by 2.3e-5 RMS, in exactly the heads that one of two threads had computed; every later pass was right. The
    projections and the hash before it were right. It did not happen with MKL limited to AVX2, and still did with
    PyTorch's own kernels limited to AVX2, so it is in what MKL computes in the attention itself: the batched products
    (sgemm_batch), the exponential and the logarithm (VML). Which of these it is remains unknown: on a Xeon with AVX-512
    but without AMX it could not be reproduced, in 80 fresh processes nor in 60 first calls each of the exponential, of
    the product and of the whole attention. So all of them are made here, and the softmax. What slips through is caught
    by RepeatedRuns.
    """
    with torch.inference_mode():
        left = torch.linspace(-1, 1, BATCH * ROWS * ROWS).reshape(BATCH, ROWS, ROWS)
        right = torch.linspace(-1, 1, BATCH * ROWS * COLUMNS).reshape(BATCH, COLUMNS, ROWS)
        logits = torch.bmm(left, right.transpose(1, 2))
        torch.bmm(torch.exp(logits - logits.amax(dim=-1, keepdim=True)), right)
        torch.log(logits.abs() + 1)
        torch.softmax(logits, dim=-1)
        rows = left.flatten(0, 1)
        torch.mm(rows, rows[:COLUMNS].T)
