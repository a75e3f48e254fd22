"""Inputs that show what a function body computes: for each operator, values at which its parts are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.dtypes import numpy_dtype
from effexport.errors import UserError
from effexport.plugins.known_ops import known_ops
from effexport.plugins.ops import OPS, Op
from effexport.proof.tolerances import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from effexport.dtypes import Array

Inputs = dict[str, "Array"]
Attributes = Mapping[str, Any]
SEED = 20_101


def operator_inputs(op: str, attributes: Attributes, dtype: str) -> Iterator[tuple[str, Inputs]]:
    """Name and inputs of each case, in the order of the operator's inputs. dtype: of the operator's type T.

    attributes: of the node. Ours have them in their calls.py, operators of users in their op.py, as `proof_inputs`.
    Raises UserError for one of a user that has none, or without PyTorch.
    """
    rng = np.random.default_rng(SEED)
    make = OPS[op].load_calls().proof_inputs if op in OPS else proof_inputs_of(known_ops()[op])
    for name, inputs in make(rng, attributes):
        # float64 stands for T; what is float32 whatever T is stays so
        yield name, {key: x.astype(numpy_dtype(dtype)) if x.dtype == np.float64 else x for key, x in inputs.items()}


def proof_inputs_of(op: Op) -> Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]]:
    """What makes the inputs for an operator of a user."""
    try:
        module = op.load()
    except ImportError as error:
        raise UserError(f"{op.package}.op does not load: {error}; expected it to, with PyTorch installed") from error
    if not hasattr(module, "proof_inputs"):
        raise UserError(f"{op.package}.op has no proof_inputs(rng, attributes); expected inputs to check the body with")
    made: Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]] = module.proof_inputs
    return made


def rounded_anew(inputs: Mapping[str, Array], precision: str, seed: int) -> Inputs:
    """The inputs with each number off by at most one rounding. Equal numbers stay equal: what depends on their
    equality would change by more than rounding explains."""
    rng = np.random.default_rng(SEED + seed)

    def moved(x: Array) -> Array:
        values, places = np.unique(x.astype(np.float64), return_inverse=True)
        values *= 1 + UNIT_ROUNDOFF[precision] * rng.uniform(-1, 1, values.shape)
        return values[places].reshape(x.shape).astype(x.dtype)

    return {name: x if x.dtype.kind in "bi" else moved(x) for name, x in inputs.items()}
