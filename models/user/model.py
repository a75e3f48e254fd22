"""A model of the user's own: the original, which is the reference, and the copy with our layers, which is exported."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapted
from effexport.models.layers import SameWeights
from effexport.models.user.drawn_numbers import DrawnNumbers, NotFrozenError
from effexport.models.user.inputs import arguments_of
from effexport.models.user.modes import OnePrecision, cast, types_of
from effexport.models.validation import SpecError, require

# Modules of PyTorch whose parameters mean what their owner makes of them, such as a bias of -inf for hidden distances.
MAY_MASK = (nn.Embedding, nn.EmbeddingBag, nn.ParameterList, nn.ParameterDict)
# How many weights an error lists.
LISTED = 3


# Where a module has what it registers.
TABLES = ("_parameters", "_buffers", "_modules")


class UnexpectedOutputError(SpecError):
    """A model returned something that is not a tensor."""


class CalledByPosition(SameWeights):
    """A model that takes tensors in the order of its inputs, and returns the tensors of its result as a tuple.

    precision: the type in which it computes and returns floating-point numbers, see `OnePrecision`; None if the model
    itself chooses their types. drawn: the random numbers that it draws in every call; None to let it draw others.
    """

    precision: torch.dtype | None = None
    drawn: DrawnNumbers | None = None
    _names: tuple[str, ...]
    _constants: Mapping[str, Any]

    def __init__(self, model: nn.Module, names: Sequence[str], constants: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._names, self._constants = tuple(names), dict(constants)

    @property
    def draws_elsewhere(self) -> bool:
        """True if it draws random numbers that are not PyTorch's."""
        return self.drawn is not None and bool(self.drawn.others)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.by_name(*tensors).values())

    def draws_for(self, tensors: Sequence[Tensor]) -> DrawnNumbers | None:
        """The random numbers that it draws for some inputs; None if it draws none, or fails.

        Raises NotFrozenError for a draw for which no stored numbers can stand.
        """
        before, drawn = self.drawn, DrawnNumbers()
        try:
            self.drawn = drawn
            with drawn.learning(), torch.inference_mode():
                self(*tensors)
        except NotFrozenError:
            raise
        except Exception:  # whatever the user's code raises: it is reported where lengths are tried
            return None
        finally:
            self.drawn = before
        return drawn or None

    def to_half(self, dtype: torch.dtype) -> None:
        """Round the parameters to a half type, and compute in it.

        Buffers stay float32, because their numbers need not be used in half precision: the frequencies of rotary
        positions, rounded to float16, turn token 2,000 by up to a radian. Only statistics of normalisations are used
        like weights.
        """
        exact = {
            (owner, name): buffer
            for owner in self.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if not isinstance(owner, nn.modules.batchnorm._NormBase)
        }
        self.to(dtype)
        for (owner, name), buffer in exact.items():
            setattr(owner, name, buffer)
        for child in self.modules():
            if isinstance(child, nn.RNNBase):
                # it refuses other types itself, before it calls a function that OnePrecision sees
                child.register_forward_pre_hook(lambda _, inputs: cast(inputs, dtype, types_of(inputs)))
        self.precision = dtype

    def by_name(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The outputs by name, see `named_outputs`; one with the name of an input gets the suffix _out.

        The model is afterwards as it was: one that keeps a table, or chooses an algorithm for good, by the sizes of its
        first input, answers as it does to its first.
        """
        # which reads the code of both as its own
        is_read = torch.compiler.is_dynamo_compiling()
        with contextlib.nullcontext() if is_read else attributes_restored(self._model):
            return self.with_state(*tensors)

    def with_state(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The same of a model that may change."""
        # a model may write to its inputs, or return them, which an exported graph cannot
        named = {name: tensor.clone() for name, tensor in zip(self._names, tensors, strict=True)}
        positional, named = arguments_of(self._model, {**named, **self._constants})
        with contextlib.ExitStack() as stack:
            if self.precision is not None:
                stack.enter_context(OnePrecision(self.precision))
            if self.drawn is not None:
                stack.enter_context(self.drawn.given(next((p.dtype for p in self.parameters()), None)))
            outputs = named_outputs(self._model(*positional, **named))
        if self.precision is not None:
            outputs = {key: x.to(self.precision) if x.is_floating_point() else x for key, x in outputs.items()}
        return {f"{key}_out" if key in self._names else key: value for key, value in distinct(outputs).items()}


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what is assigned to attributes of a module and its submodules, parts of it included."""
    before = [(vars(child), dict(vars(child))) for child in model.modules()]
    tables = [(one, dict(one)) for attributes, _ in before for one in map(attributes.get, TABLES) if one is not None]
    try:
        yield
    finally:
        for found, kept in (*before, *tables):
            if found.keys() != kept.keys() or any(found[name] is not value for name, value in kept.items()):
                found.clear()
                found.update(kept)


class CalledAsFile(SameWeights):
    """A model under the names of an ONNX file that another exporter has made of it.

    arguments: of `forward`, by the input of the file that has another name. results: of the model, as `named_outputs`
    names them, by the output of the file; None for all under their own names.
    """

    results: Mapping[str, str] | None = None

    def __init__(self, model: nn.Module, arguments: Mapping[str, str]) -> None:
        super().__init__(model)
        self._arguments = dict(arguments)

    def train(self, mode: bool = True) -> CalledAsFile:
        """Set the mode of the model as well, which is not a submodule."""
        self._model.train(mode)
        return super().train(mode)

    def forward(self, **tensors: Any) -> dict[str, Tensor]:
        given = {self._arguments.get(name, name): value for name, value in tensors.items()}
        positional, named = arguments_of(self._model, given)
        found = named_outputs(self._model(*positional, **named))
        return found if self.results is None else {name: found[result] for name, result in self.results.items()}


class FileModule(nn.Module):
    """An ONNX file in the place of a model. run: takes arrays by name, and returns arrays by name; copies share it.

    It computes in the precision of the file: a copy in float64 raises TypeError.
    """

    def __init__(self, run: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(()), requires_grad=False)
        self._run = run

    def __deepcopy__(self, memo: dict[int, Any]) -> FileModule:
        return FileModule(self._run)

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        if self.mark.dtype is not torch.float32:
            raise TypeError("it is an ONNX file, which has one precision")
        found = self._run({name: tensor.numpy() for name, tensor in tensors.items()})
        return {name: torch.from_numpy(array) for name, array in found.items()}


def called_by_position(model: nn.Module, names: Sequence[str], constants: Mapping[str, Any]) -> CalledByPosition:
    """A model as torch.onnx needs it: with one argument of `forward` for each input."""

    def forward(self: CalledByPosition, *tensors: Tensor) -> tuple[Tensor, ...]:
        return CalledByPosition.forward(self, *tensors)

    # files of other exporters have names such as input.1
    safe = [name if name.isidentifier() and not iskeyword(name) else f"input_{i}" for i, name in enumerate(names)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *safe)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    kind = type("CalledByPosition", (CalledByPosition,), {"forward": forward})
    called: CalledByPosition = kind(model, names, constants)
    return called


def name_results(user: UserModel, results: Mapping[str, str]) -> None:
    """Let a model that is called as a file return these results; see `CalledAsFile`."""
    for module in (user.original, user.module):
        assert isinstance(module, CalledByPosition)
        assert isinstance(module._model, CalledAsFile)
        module._model.results = results


def drawing_model(module: nn.Module) -> CalledByPosition | None:
    """The model that draws random numbers in a module that is to be exported, also below a head; None if none does."""
    while isinstance(module, SameWeights) and not isinstance(module, CalledByPosition):
        module = module._model
    return module if isinstance(module, CalledByPosition) and module.drawn is not None else None


def distinct(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, each a tensor of its own: two names of one value would become one in a graph."""
    seen: set[int] = set()
    found = {}
    for name, value in outputs.items():
        found[name] = value.clone() if id(value) in seen else value
        seen.add(id(value))
    return found


@dataclass(frozen=True)
class UserModel:
    """Both modules take tensors in the order of the inputs, and return a tuple of tensors.

    original: as it was given, float32 and in evaluation mode. adapted: our copy of it. examples: the tensors that it
    was given with, by name; empty if there are none. declared: axes that the user has named as free.
    """

    original: nn.Module
    adapted: Adapted
    examples: Mapping[str, Tensor] = field(default_factory=dict)
    declared: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The exported module; called by position, too."""
        return self.adapted.module


def model_of_ours(module: nn.Module) -> UserModel:
    """A module of our layers, which is its own original and its own copy."""
    return UserModel(module, Adapted(module, {}, {}))


def named_outputs(result: object, name: str = "output") -> dict[str, Tensor]:
    """The tensors in what a model returns, by name: keys of dictionaries and fields of dataclasses, `output` for one
    tensor, `output0`, `output1`, … for several in a tuple. None is left out.

    Raises UnexpectedOutputError for anything else.
    """
    if isinstance(result, torch.Tensor):
        return {name: result}
    found: dict[str, Tensor] = {}
    for key, value in named_parts(result, name):
        found |= named_outputs(value, key)
    return found


def named_parts(result: object, name: str) -> Iterator[tuple[str, object]]:
    if result is None:
        return
    top = name == "output"
    if isinstance(result, Mapping):
        parts = [(str(key), value) for key, value in result.items()]
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        parts = [(item.name, getattr(result, item.name)) for item in dataclasses.fields(result)]
    elif isinstance(result, tuple | list):
        fields = getattr(result, "_fields", None)
        if fields is None:
            yield from ((f"{name}{i}" if top else f"{name}_{i}", value) for i, value in enumerate(result))
            return
        parts = list(zip(fields, result, strict=True))
    else:
        where = "" if top else f" as {name}"
        raise UnexpectedOutputError(
            f"the model returns {type(result).__name__}{where}; expected tensors, or dictionaries, dataclasses and "
            "tuples of them: return less, or leave it out with an argument of forward"
        )
    yield from ((key if top else f"{name}_{key}", value) for key, value in parts)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel or the average of weights."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel", "AveragedModel"):
            inner = model.module
        if inner is None:
            return model
        model = inner


def check_model(model: nn.Module, name: str) -> None:
    """Raise SpecError for a model that cannot be copied and run here: on another device, or compiled to
    TorchScript."""
    require(
        not isinstance(model, torch.jit.ScriptModule),
        f"{name} is TorchScript, which has no layers to look at; give the nn.Module that it was made from",
    )
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            owner = path.rpartition(".")[0]
            place = f"{name}: {owner or 'the model'} has its {path.rpartition('.')[2]} on {tensor.device}"
            remedy = (
                "meta tensors have no values: load the weights first"
                if tensor.is_meta
                else "return model.cpu(): the export and its reference run on the CPU"
            )
            raise SpecError(f"{place}; expected cpu; {remedy}")


def check_weights(model: nn.Module, name: str) -> None:
    """Raise SpecError for weights with NaN, and for infinity in a layer of PyTorch. A parameter of another layer may be
    a mask, with -inf in it, and so may a buffer."""
    problems = []
    for path, tensor, finite in computed_with(model):
        broken = ~tensor.isfinite() if finite else tensor.isnan()
        if count := int(broken.sum()):
            what = "NaN" if tensor.isnan().any() else "infinity"
            problems.append(f"{path} ({what} in {count:,} of {tensor.numel():,} elements)")
    more = f" and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    require(
        not problems,
        f"{name} has weights that are not finite: {', '.join(problems[:LISTED])}{more}; expected numbers: its training "
        "has probably diverged, or they were never set: load weights from before that",
    )


def computed_with(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The parameters and statistics of a model in float32, by path, each once; and whether all must be finite."""
    seen: set[int] = set()
    for path, child in model.named_modules():
        kind = type(child)
        is_torch = kind.__module__.startswith("torch.nn.modules") and not isinstance(child, MAY_MASK)
        parts = dict(child.named_parameters(recurse=False))
        if isinstance(child, nn.modules.batchnorm._NormBase):
            parts |= dict(child.named_buffers(recurse=False))
        for key, tensor in parts.items():
            is_plain = tensor.is_floating_point() and tensor.layout is torch.strided
            if id(tensor) not in seen and is_plain and not nn.parameter.is_lazy(tensor):
                seen.add(id(tensor))
                # for types of 8 bits, PyTorch has no isfinite
                yield f"{path}.{key}" if path else key, tensor.detach().float(), is_torch


def training_note(model: nn.Module, evaluated: nn.Module, name: str) -> tuple[str, ...]:
    """A sentence on layers that compute something else in training mode, which is on; none if there are none.

    evaluated: the model after eval(), which may have been overridden to leave some of them in training mode.
    """
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    active = [
        f"{path or name} ({type(child).__name__})"
        for (path, child), after in zip(model.named_modules(), evaluated.modules(), strict=True)
        if child.training and not after.training and isinstance(child, kinds) and getattr(child, "p", 1) > 0
    ]
    if not active:
        return ()
    more = f" and {len(active) - 1} other place{'s' * (len(active) > 2)}" if len(active) > 1 else ""
    return (f"{name} is in training mode, which changes {active[0]}{more}; it is exported as after eval().",)


def precision_note(model: nn.Module, name: str) -> tuple[str, ...]:
    """A sentence on weights in half precision; none if there are none."""
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype in (torch.half, torch.bfloat16)}
    if not found:
        return ()
    return (
        f"{name} has weights in {' and '.join(sorted(found))}; the reference is a copy in float32, and the file has "
        "the precision of the build.",
    )


def shared_note(model: nn.Module, replaced: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """A sentence on weights that a replaced layer shares with another layer; none if there are none."""
    owners: dict[int, list[str]] = {}
    for path, child in model.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for places in owners.values():
        if len(places) > 1 and any(place.startswith(f"{path}.") for place in places for path in replaced):
            return (f"{places[0]} and {places[1]} are one tensor; the exported file may hold it twice.",)
    return ()


def tensors_of(output: object) -> list[Tensor]:
    """The tensors in what a layer returns."""
    parts = output if isinstance(output, tuple | list) else (output,)
    # nested tensors, which PyTorch's own encoder uses inside, cannot be compared
    return [part for part in parts if isinstance(part, torch.Tensor) and not part.is_nested]


@contextlib.contextmanager
def recorded_results(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The tensors that every submodule returns during the block, by path, in the order in which they end."""
    results: dict[str, list[Tensor]] = {}

    def recorder(path: str) -> Any:
        def record(child: nn.Module, inputs: object, output: object) -> None:
            results.setdefault(path, []).extend(part.detach().clone() for part in tensors_of(output))

        return record

    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            stack.callback(child.register_forward_hook(recorder(path)).remove)
        yield results
