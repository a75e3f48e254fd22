"""Requests that share a run: joined along the batch axis, padded if needed, and their outputs taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.dtypes import Array, TensorInfo
    from effexport.spec import BuildSpec

Key = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Padding:
    """Padding of requests of different lengths to one length.

    inputs, outputs: the axis of tokens of each input and output that has one. values: what stands in the padded places
    of an input, if not 0.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    values: Mapping[str, int]

    @classmethod
    def from_spec(cls, spec: BuildSpec) -> Padding:
        return cls(token_axes(spec.inputs), token_axes(spec.outputs), {"input_ids": spec.model.pad_token_id})

    def length_of(self, feeds: Mapping[str, Array]) -> int:
        """Tokens of a request; 0 if no input has an axis of tokens. feeds: all inputs of the model."""
        return next((int(feeds[name].shape[axis]) for name, axis in self.inputs.items()), 0)


def token_axes(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    return {tensor.name: tensor.dims.index("seq") for tensor in tensors if "seq" in tensor.dims}


# For requests that only run together if they have the same length.
NO_PADDING = Padding({}, {}, {})


def rows_of(feeds: Mapping[str, Array]) -> int:
    """Rows of a request: those of its first input, which has a batch axis wherever requests are joined."""
    first = next(iter(feeds.values()))
    return len(first) if first.ndim else 1


def joining_key(feeds: Mapping[str, Array], padding: Padding = NO_PADDING) -> Key:
    """Equal for requests that differ only in their number of rows and in what `padding` pads.

    feeds: all inputs of the model.
    """

    def sizes(name: str) -> tuple[int, ...]:
        free = (0, padding.inputs.get(name))
        return tuple(size for axis, size in enumerate(feeds[name].shape) if axis not in free)

    return tuple(sizes(name) for name in sorted(feeds))


def joined_feeds(feeds: Sequence[Mapping[str, Array]], padding: Padding = NO_PADDING) -> Mapping[str, Array]:
    """The feeds of several requests as one batch, of the length of the longest. A padded attention mask is 0."""
    if len(feeds) == 1:
        return feeds[0]
    return {
        name: joined([one[name] for one in feeds], padding.inputs.get(name), padding.values.get(name, 0))
        for name in feeds[0]
    }


def joined(arrays: Sequence[Array], axis: int | None, value: int) -> Array:
    """One array of all rows. axis: along which shorter ones are padded with `value`."""
    import numpy as np

    if axis is None or len({array.shape[axis] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = [sum(map(len, arrays)), *arrays[0].shape[1:]]
    shape[axis] = max(array.shape[axis] for array in arrays)
    whole = np.full(shape, value, dtype=arrays[0].dtype)
    start = 0
    for array in arrays:
        cropped(whole[start : start + len(array)], axis, array.shape[axis])[...] = array
        start += len(array)
    return whole


def split_outputs(
    outputs: Mapping[str, Array], rows: Sequence[int], lengths: Sequence[int] = (), padding: Padding = NO_PADDING
) -> list[Mapping[str, Array]]:
    """The outputs of each request, as views. rows, lengths: of each request; only padding needs lengths."""
    if len(rows) == 1:
        return [outputs]
    parts: list[Mapping[str, Array]] = []
    start = 0
    for number, count in enumerate(rows):
        parts.append(
            {
                name: cropped(array[start : start + count], padding.outputs[name], lengths[number])
                if name in padding.outputs
                else array[start : start + count]
                for name, array in outputs.items()
            }
        )
        start += count
    return parts


def cropped(array: Array, axis: int, length: int) -> Array:
    """The first entries along an axis, as a view."""
    return array[(slice(None),) * axis + (slice(length),)]


def padding_share(rows: Sequence[int], lengths: Sequence[int]) -> float:
    """The share of a run's tokens that would be padding. rows, lengths: of each request."""
    own = sum(count * length for count, length in zip(rows, lengths, strict=True))
    whole = sum(rows) * max(lengths)
    return 1 - own / whole if whole else 0.0
