"""Attention variants, one folder each: `__init__.py` has the options and facts, `layer.py` the layer and its contract.

A folder whose spec has a `place` is a variant for users. No torch here.
"""

from __future__ import annotations

import importlib
import pkgutil

from effexport.models.attention_spec import offered

for found in pkgutil.iter_modules(__path__):
    if found.ispkg:
        importlib.import_module(f"{__name__}.{found.name}")

ATTENTION_SPECS = offered()
# Those whose causal models decode with a state of constant size.
WITH_STATE = tuple(name for name, spec in ATTENTION_SPECS.items() if spec.causal_state_is_constant)
