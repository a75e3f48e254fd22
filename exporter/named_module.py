"""The module of the user's own that an artifact came from, named again: `--module` of verify and refit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.errors import UserError
from effexport.export.module_source import (
    ModuleSource,
    module_from_factory,
    module_with_weights,
    origin_of_module,
    source_from_user,
)
from effexport.models.module_spec import ModuleSpec
from effexport.models.validation import SpecError
from effexport.proof.stored_cases import stored_cases
from effexport.quiet import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class NamedModule:
    """A module, or `package.module:factory`, or `file.py:factory`.

    weights: a file with a state_dict for it. examples: what it is called with; None for those of the factory or of the
    golden file.
    """

    module: nn.Module | str
    weights: Path | None = None
    examples: object = None

    def source_for(self, artifact: Artifact) -> ModuleSource:
        """The module as the source of an artifact: with its inputs, axes, constants and replaced layers.

        The caller's own module stays as it is. Raises UserError for an artifact that did not come from a module, and
        for a module with other inputs, outputs or layers.
        """
        from effexport.models.module_again import module_again

        spec, origin = artifact.spec, origin_of_module(self.module)
        if not isinstance(spec.model, ModuleSpec):
            raise UserError(
                f"{artifact.path} did not come from a module of your own, but from {spec.model.title}, weights: "
                f"{artifact.manifest.weights_from}; leave --module out"
            )
        module, examples = self.module, self.examples
        if isinstance(module, str):
            module, of_factory, _ = module_from_factory(module)
            examples = of_factory if examples is None else examples
        try:
            if self.weights is not None:
                module = module_with_weights(module, origin, self.weights)
            examples = stored_example(artifact) if examples is None else examples
            with quiet():
                user = module_again(module, origin, spec.model, examples)
        except SpecError as error:
            raise UserError(f"{origin} does not fit {artifact.path}: {error}") from error
        return source_from_user(user, origin, spec)


def stored_example(artifact: Artifact) -> dict[str, Tensor] | None:
    """The example inputs that the module was built with, if the artifact keeps them."""
    import torch

    from effexport.proof.original import EXAMPLE

    cases = stored_cases(artifact.reference_path, artifact.spec) if artifact.has_golden else []
    found = next((case.inputs for case in cases if case.name == EXAMPLE), None)
    return None if found is None else {name: torch.from_numpy(array) for name, array in found.items()}
