"""The module of a build: made by its source, with the head of the spec, if the machine has the memory."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from effexport.base.environment import total_memory_bytes
from effexport.base.errors import UserError
from effexport.base.formatting import memory
from effexport.base.spec import BuildSpec
from effexport.models.shapes import count
from effexport.models.sources import ModelSource, source_from_seed

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.user.model import UserModel


def model_from_source(source: ModelSource, spec: BuildSpec) -> UserModel:
    """The module of a build, beside the original that it is a copy of; a module of ours is its own."""
    from effexport.models.encoder.module import with_head
    from effexport.models.user.model import model_of_ours

    check_memory(spec)
    module = with_head(source.make(spec.model, spec.seed), spec.head, spec.model)
    if source.user is None:
        return model_of_ours(module)
    original = with_head(source.user.original, spec.head, spec.model)
    return replace(source.user, original=original, adapted=replace(source.user.adapted, module=module))


def module_from_seed(spec: BuildSpec) -> nn.Module:
    return model_from_source(source_from_seed(spec.model), spec).module


def check_memory(spec: BuildSpec) -> None:
    """Raise UserError for a model that this machine cannot hold, however little else a build would take."""
    if reason := why_too_large(spec):
        raise UserError(f"{reason}: {spec.model.remedy_for_size}")


def why_too_large(spec: BuildSpec) -> str:
    """The reason this machine cannot hold a model; "" if it may, or if its memory is not known."""
    total, needed = total_memory_bytes(), spec.least_bytes
    if total is None or needed <= total:
        return ""
    return (
        f"the {spec.model.title} has {count(spec.model.weights()):,} parameters and needs at least {memory(needed)} "
        f"for them and {spec.batch} × {spec.model.seq_len} tokens; this machine has {memory(total)}"
    )


def weights_digest(module: nn.Module) -> str:
    """Checksum of all parameters and buffers, to recognise the module when it is rebuilt."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
