"""How PyTorch traces the code of a user's own module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from effexport.models.user.einsum_calls import EinsumCalls
from effexport.models.user.one_precision import WithoutAutocast
from effexport.models.user.pooling import PoolingCalls
from effexport.models.user.recurrent import RecurrentCalls
from effexport.models.user.size_arithmetic import arithmetic_of_sizes


@contextlib.contextmanager
def code_as_exported(module: nn.Module) -> Iterator[None]:
    """Read the code of a user's own module as it is exported, but for attention, for the length of a `with` block."""
    with (
        torch.random.fork_rng(devices=[]),  # the code may seed it
        WithoutAutocast(),
        RecurrentCalls(),
        EinsumCalls(),
        PoolingCalls(),
        arithmetic_of_sizes(module),
    ):
        yield
