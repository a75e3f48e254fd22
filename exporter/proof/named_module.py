"""The module of the user's own that an artifact came from, named again: `--module` of verify and refit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.base.quiet import quiet
from effexport.models.contract import ModelContract
from effexport.models.sources import ModelSource, loaded_module, module_with_weights, source_from_user
from effexport.models.user.inputs import inputs_from_spec
from effexport.models.validation import SpecError, require
from effexport.proof.cases import stored_cases
from effexport.proof.rebuilt_module import source_of_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from effexport.models.user.model import UserModel


@dataclass(frozen=True)
class NamedModule:
    """A module, or `package.module:factory`, or `file.py:factory`.

    weights: a file with a state_dict for it.
    examples: what it is called with; None for those of the factory or of the golden file.
    """

    module: nn.Module | str
    weights: Path | None = None
    examples: object = None

    def source_for(self, artifact: Artifact) -> ModelSource:
        """The module as the source of an artifact: with its inputs, axes, constants and replaced layers.

        The caller's own module stays as it is. Raises UserError for an artifact that did not come from a module, and
        for a module with other inputs, outputs or layers.
        """
        model = artifact.spec.model
        if not model.why_not_alone:
            raise UserError(
                f"{artifact.path} did not come from a module of your own, but from {model.title}, weights: "
                f"{artifact.manifest.weights_from}; leave --module out"
            )
        module, origin, of_factory, _ = loaded_module(self.module)
        examples = of_factory if self.examples is None else self.examples
        try:
            if self.weights is not None:
                module = module_with_weights(module, origin, self.weights)
            examples = stored_example(artifact) if examples is None else examples
            with quiet():
                user = module_again(module, origin, model, examples)
        except SpecError as error:
            raise UserError(f"{origin} does not fit {artifact.path}: {error}") from error
        return source_from_user(user, model, origin)


def source_of_verify(artifact: Artifact, weights: Path | None, named: NamedModule | None) -> ModelSource | None:
    """The weights or the module that an artifact was built from, as the user names them; None without either."""
    return source_of_weights(artifact, weights) if named is None else named.source_for(artifact)


def module_again(module: nn.Module, name: str, spec: ModelContract, examples: object = None) -> UserModel:
    """The user's own module of an artifact, or one with other weights. examples: what it is called with, if the user
    says so. Raises SpecError for another model than that of the spec."""
    from effexport.models.user.model import unwrapped
    from effexport.models.user.spec_from_module import Calling, model_and_spec

    inputs = inputs_from_spec(unwrapped(module), name, spec, examples)
    length = spec.seq_len if spec.has_seq else None
    user, found = model_and_spec(module, name, length, Calling(inputs=inputs, replaced=spec.replaced))
    for what, own, expected in (
        ("outputs", axes_by_name(found), axes_by_name(spec)),
        ("replaced layers", dict(found.replaced), dict(spec.replaced)),
    ):
        for key in dict.fromkeys([*expected, *own]):
            require(
                own.get(key) == expected.get(key),
                f"its {what} differ: {key!r} is {own.get(key, 'not there')}; the artifact has "
                f"{expected.get(key, 'none')}",
            )
    return user


def axes_by_name(spec: ModelContract) -> dict[str, str]:
    """The type and the axes of every output, such as float ['batch', 'seq', 64]."""
    return {name: f"{spec.element_types.get(name, 'float')} {list(dims)}" for name, dims in spec.outputs.items()}


def stored_example(artifact: Artifact) -> dict[str, Tensor] | None:
    """The example inputs that the module was built with, if the artifact keeps them."""
    import torch

    from effexport.proof.inputs import EXAMPLE

    cases = stored_cases(artifact.reference_path, artifact.spec) if artifact.has_golden else []
    found = next((case.inputs for case in cases if case.name == EXAMPLE), None)
    return None if found is None else {name: torch.from_numpy(array) for name, array in found.items()}
