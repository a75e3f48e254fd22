"""Where the module of a build comes from: the seed, a file of weights, a checkpoint folder, or the user's own code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from effexport.environment import total_memory_bytes
from effexport.errors import UserError
from effexport.models.shapes import count
from effexport.spec import BuildSpec
from effexport.units import listed, memory

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.user.model import UserModel

SEED = "seed"
# Which model weights have to fit, for errors: that of an artifact, and that of a build.
OF_ARTIFACT = "that the artifact holds"
OF_OPTIONS = "that the options describe: check --scope and the sizes"


@dataclass(frozen=True)
class ModuleSource:
    """Where a module comes from.

    make: returns the module of a spec, float32, in evaluation mode. origin: text for the manifest, without the path.
    user: of a user's own model, the original as well.
    """

    origin: str
    make: Callable[[BuildSpec], nn.Module]
    user: UserModel | None = None

    def model(self, module: nn.Module) -> UserModel:
        """A module that was made, beside the original that it is a copy of; a module of ours is its own."""
        from effexport.models.user.model import model_of_ours

        return self.user or model_of_ours(module)


def source_from_seed() -> ModuleSource:
    return ModuleSource(SEED, module_from_seed)


def source_from_path(path: Path | None, which: str = OF_ARTIFACT) -> ModuleSource:
    """The source for --weights: a checkpoint folder, or a safetensors file for a model of ours; None for the seed.

    which: OF_ARTIFACT or OF_OPTIONS.
    """
    if path is None:
        return source_from_seed()
    return ModuleSource(path.resolve().name, lambda spec: module_from_path(spec, path, which))


def source_from_user(user: UserModel, name: str, spec: BuildSpec) -> ModuleSource:
    """The source of a user's own model: the original and the copy with our layers, both with the head of the spec."""
    from effexport.models.encoder.module import with_head

    adapted = replace(user.adapted, module=with_head(user.module, spec.head, spec.model))
    user = replace(user, original=with_head(user.original, spec.head, spec.model), adapted=adapted)
    return ModuleSource(name, lambda spec: user.module, user)


def check_memory(spec: BuildSpec) -> None:
    """Raise UserError for a model that this machine cannot hold, however little else a build would take."""
    if reason := why_too_large(spec):
        raise UserError(f"{reason}: {spec.model.remedy_for_size}")


def why_too_large(spec: BuildSpec) -> str:
    """Why this machine cannot hold a model; "" if it may, or if its memory is not known."""
    total, needed = total_memory_bytes(), spec.least_bytes
    if total is None or needed <= total:
        return ""
    return (
        f"the {spec.model.title} has {count(spec.model.weights()):,} parameters and needs at least {memory(needed)} "
        f"for them and {spec.batch} × {spec.model.seq_len} tokens; this machine has {memory(total)}"
    )


def module_from_seed(spec: BuildSpec) -> nn.Module:
    from effexport.models.encoder.module import module_from_spec, with_head

    check_memory(spec)
    return with_head(module_from_spec(spec.model, spec.seed), spec.head, spec.model)


def module_from_path(spec: BuildSpec, path: Path, which: str = OF_ARTIFACT) -> nn.Module:
    """The module with its weights. Raises SpecError for weights that do not fit."""
    from effexport.models.checkpoints import weights as checkpoint
    from effexport.models.encoder.module import with_head

    if spec.model.recipe == "checkpoint":
        check_memory(spec)
        return with_head(checkpoint.module_from_checkpoint(path, spec.model), spec.head, spec.model)
    module = module_from_seed(spec)
    found = checkpoint.read_tensors(path)
    # buffers, such as rotations, may be in the file; without them they come from the spec
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in found}
    names = [*(name for name, _ in module.named_parameters()), *buffers]
    expected = (
        f"the state_dict of the {spec.model.title} {which}. The names are those of effexport.models: rename the "
        "tensors of another model, or write it with layers of effexport.models and build it with --module"
    )
    misfits = [name for name, buffer in buffers.items() if buffer.shape != found[name].shape]
    if misfits:
        expected += f". For another number of hash rounds or buckets, leave {listed(misfits)} out of the file"
        expected += ": rotations that are not in it are drawn from the seed"
    checkpoint.fill_module(module, found, {name: (name,) for name in names}, (), path, expected)
    return module


def module_with_weights(module: nn.Module, name: str, path: Path) -> nn.Module:
    """A copy of a user's own module with the weights of a file. Raises SpecError for those that do not fit."""
    from effexport.models.adapters.folding import detached_copy
    from effexport.models.checkpoints import weights as checkpoint

    copy = detached_copy(module)
    names = {name: (name,) for name in copy.state_dict()}
    checkpoint.fill_module(copy, checkpoint.read_tensors(path), names, (), path, f"the state_dict of {name}")
    return copy


def origin_of_module(module: nn.Module | str) -> str:
    """How manifests and messages name a user's own module. Manifests hold no paths of this machine."""
    if isinstance(module, str):
        return Path(module).name if module.rpartition(":")[0].endswith(".py") else module
    return type(module).__name__


def module_from_factory(name: str) -> tuple[nn.Module, object, Mapping[str, object] | None]:
    """Call `package.module:factory`, or `path/to/file.py:factory`, and take what it returns: a module; or a module and
    example inputs; or these and the free axes of the inputs.

    The current folder, or that of the file, is searched first until the factory returns. Raises UserError if it does
    not exist, needs arguments, fails or returns something else.
    """
    from torch import nn

    path, _, factory = name.rpartition(":")
    if not path or not factory.isidentifier():
        raise UserError(
            f"--module is {name!r}; expected package.module:factory or file.py:factory, a function without arguments"
        )
    file = Path(path).resolve() if path.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UserError(f"--module {name}: no file at {file}; expected package.module:factory or file.py:factory")
    with folder_on_path("" if file is None else str(file.parent)):
        try:
            function = getattr(importlib.import_module(path) if file is None else module_of_file(file), factory)
        except (ImportError, AttributeError) as error:
            raise UserError(f"--module {name}: {error}; expected a function that can be imported from here") from error
        except (Exception, SystemExit) as error:  # as below
            raise UserError(f"--module {name}: importing {path} failed with {failure_of_user(error)}") from error
        check_needs_no_arguments(function, name)
        try:
            made = function()
        except (Exception, SystemExit) as error:  # code of the user's, which may raise anything
            raise UserError(f"--module {name} failed with {failure_of_user(error)}") from error
    parts = made if isinstance(made, tuple) and made and isinstance(made[0], nn.Module) else (made,)
    module, examples, dynamic = (*parts, None, None)[:3]
    if not isinstance(module, nn.Module) or len(parts) > 3 or not isinstance(dynamic, Mapping | None):
        raise UserError(
            f"--module {name} returned a {type(made).__name__}; expected an nn.Module, or (module, example inputs), or "
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
    """Raise UserError unless a factory can be called as it is."""
    if not callable(function):
        raise UserError(f"--module {name} is a {type(function).__name__}; expected a function without arguments")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of code that is not Python
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise UserError(
            f"--module {name} needs arguments: {', '.join(needed)}; expected a function without arguments: give them "
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


def weights_digest(module: nn.Module) -> str:
    """Checksum of all parameters and buffers, to recognise the module when it is rebuilt."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
