"""Sources of models: a variant, a published checkpoint, or a module of the user's own.

Loads no torch before a module is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from effexport.models.checkpoints.spec import check_weights_file, spec_from_checkpoint
from effexport.models.contract import ModelContract
from effexport.models.validation import SpecError

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.user.model import UserModel

SEED = "seed"
# Which model weights have to fit, for errors: that of an artifact, and that of a build.
OF_ARTIFACT = "that the artifact holds"
OF_OPTIONS = "that the options describe: check --scope and the sizes"


@dataclass(frozen=True)
class ModelSource:
    """The source of a model's module.

    make: the contract and a seed → the module, float32, in evaluation mode. origin: of its weights, for manifests,
    without the path. name: for a folder. notes: for the report. path: of its weights, as the user gave it.
    user: the original of a module of the user's own, beside the copy that `make` returns.
    """

    contract: ModelContract
    make: Callable[[ModelContract, int], nn.Module]
    origin: str = SEED
    name: str = ""
    notes: tuple[str, ...] = ()
    path: Path | None = None
    user: UserModel | None = None

    @property
    def is_original(self) -> bool:
        """True if the user has the original, whose answers judge a model whatever its weights are."""
        return self.user is not None


def source_from_seed(contract: ModelContract) -> ModelSource:
    return ModelSource(contract, drawn_module, name=contract.attention.variant)


def drawn_module(contract: ModelContract, seed: int) -> nn.Module:
    """A model with weights that are drawn from a seed."""
    from effexport.models.encoder.module import module_from_spec

    return module_from_spec(contract, seed)


def source_from_path(
    contract: ModelContract, path: Path | None, which: str = OF_ARTIFACT, notes: Sequence[str] = ()
) -> ModelSource:
    """The source of --weights: a checkpoint folder, or a safetensors file for a model of ours; None for the seed.

    which: OF_ARTIFACT or OF_OPTIONS.
    """
    if path is None:
        return source_from_seed(contract)
    origin, make = path.resolve().name, functools.partial(module_from_path, path, which)
    return ModelSource(
        contract, make, origin, origin if contract.family else contract.attention.variant, tuple(notes), path
    )


def source_of_new_weights(path: Path, contract: ModelContract) -> ModelSource:
    """A file of weights for a contract or, for that of a checkpoint, another checkpoint, of which the contract may be
    another. Raises SpecError for anything else."""
    if contract.family:
        contract, _ = spec_from_checkpoint(path, contract.build_options)
    else:
        check_weights_file(path)
    return source_from_path(contract, path)


def source_from_user(user: UserModel, contract: ModelContract, origin: str) -> ModelSource:
    """The source of a module of the user's own, whose copy exists already."""
    return ModelSource(contract, lambda contract, seed: user.module, origin, origin.rpartition(":")[2], user=user)


def module_from_path(path: Path, which: str, contract: ModelContract, seed: int) -> nn.Module:
    """The module with its weights. Raises SpecError for weights that do not fit."""
    from effexport.models.checkpoints.weights import fill_module, module_from_checkpoint, read_tensors
    from effexport.models.encoder.module import module_from_spec

    if contract.family:
        return module_from_checkpoint(path, contract)
    module = module_from_spec(contract, seed)
    found = read_tensors(path)
    # buffers, such as rotations, may be in the file; without them they come from the spec
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in found}
    names = [*(name for name, _ in module.named_parameters()), *buffers]
    expected = (
        f"the state_dict of the {contract.title} {which}. The names are those of effexport.models: rename the "
        "tensors of another model, or write it with layers of effexport.models and build it with --module"
    )
    misfits = [name for name, buffer in buffers.items() if buffer.shape != found[name].shape]
    if misfits:
        them = " and ".join([", ".join(misfits[:-1]), misfits[-1]] if len(misfits) > 1 else misfits)
        expected += f". For another number of hash rounds or buckets, leave {them} out of the file"
        expected += ": rotations that are not in it are drawn from the seed"
    fill_module(module, found, {name: (name,) for name in names}, (), path, expected)
    return module


def module_with_weights(module: nn.Module, name: str, path: Path) -> nn.Module:
    """A copy of a user's own module with the weights of a file. Raises SpecError for those that do not fit."""
    from effexport.models.adapters.folding import detached_copy
    from effexport.models.checkpoints.weights import fill_module, read_tensors

    copy = detached_copy(module)
    names = {name: (name,) for name in copy.state_dict()}
    fill_module(copy, read_tensors(path), names, (), path, f"the state_dict of {name}")
    return copy


def loaded_module(
    module: nn.Module | str, flag: str = "--module"
) -> tuple[nn.Module, str, object, Mapping[str, object] | None]:
    """A module of the user's own, or what its factory returns: the module, how manifests and messages name it, without
    paths of this machine, and the example inputs and their free axes that come with it, each None without them.

    flag: its name in errors.
    """
    if not isinstance(module, str):
        return module, type(module).__name__, None, None
    made, examples, dynamic = module_from_factory(module, flag)
    origin = Path(module).name if module.rpartition(":")[0].endswith(".py") else module
    return made, origin, examples, dynamic


def module_from_factory(name: str, flag: str = "--module") -> tuple[nn.Module, object, Mapping[str, object] | None]:
    """Call `package.module:factory`, or `path/to/file.py:factory`, and take what it returns: a module; or a module and
    example inputs; or these and the free axes of the inputs.

    The current folder, or that of the file, is searched first until the factory returns. Raises SpecError if it does
    not exist, needs arguments, fails or returns something else.
    """
    from torch import nn

    path, _, factory = name.rpartition(":")
    if not path or not factory.isidentifier():
        raise SpecError(
            f"{flag} is {name!r}; expected package.module:factory or file.py:factory, a function without arguments"
        )
    file = Path(path).resolve() if path.endswith(".py") else None
    if file is not None and not file.is_file():
        raise SpecError(f"{flag} {name}: no file at {file}; expected package.module:factory or file.py:factory")
    with folder_on_path("" if file is None else str(file.parent)):
        try:
            function = getattr(importlib.import_module(path) if file is None else module_of_file(file), factory)
        except (ImportError, AttributeError) as error:
            raise SpecError(f"{flag} {name}: {error}; expected a function that can be imported from here") from error
        except (Exception, SystemExit) as error:  # as below
            raise SpecError(f"{flag} {name}: importing {path} failed with {failure_of_user(error)}") from error
        check_needs_no_arguments(function, f"{flag} {name}")
        try:
            made = function()
        except (Exception, SystemExit) as error:  # code of the user's, which may raise anything
            raise SpecError(f"{flag} {name} failed with {failure_of_user(error)}") from error
    parts = made if isinstance(made, tuple) and made and isinstance(made[0], nn.Module) else (made,)
    module, examples, dynamic = (*parts, None, None)[:3]
    if not isinstance(module, nn.Module) or len(parts) > 3 or not isinstance(dynamic, Mapping | None):
        raise SpecError(
            f"{flag} {name} returned a {type(made).__name__}; expected an nn.Module, or (module, example inputs), or "
            "(module, example inputs, free axes by input)"
        )
    return module, examples, dynamic


def module_of_file(file: Path) -> ModuleType:
    """Import a file under its own name, or under a longer one if another module has that."""
    known = sys.modules.get(file.stem)
    name = file.stem if known is None or getattr(known, "__file__", None) == str(file) else f"effexport_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_needs_no_arguments(function: object, name: str) -> None:
    """Raise SpecError unless a factory can be called as it is. name: with the flag that names it."""
    if not callable(function):
        raise SpecError(f"{name} is a {type(function).__name__}; expected a function without arguments")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of code that is not Python
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise SpecError(
            f"{name} needs arguments: {', '.join(needed)}; expected a function without arguments: give them "
            "default values, or name a function that passes yours"
        )


def failure_of_user(error: BaseException) -> str:
    """The type, message and place of an error in code of the user's, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    # a function that is not Python, such as sys.exit, has no line of its own
    place = "" if frame.filename == __file__ else f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{text}{place}; --debug shows all of it"


@contextlib.contextmanager
def folder_on_path(folder: str) -> Iterator[None]:
    """Search a folder first, "" for the current one. Only for a while: later, PyTorch would find a folder `triton`
    there."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(folder)
