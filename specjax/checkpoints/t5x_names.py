"""T5X's two parameter trees as one: scanned layers are taken apart, heads merged.

Unscanned, as ours: `encoder/layers_3/attention/query/kernel (E, H·D)`. With `scan_layers` (T5X's
scalable_t5) the layers lie on axis 1 of one array and the heads are kept apart,
`encoder/encoder/attention/query/kernel (E, L, H, D)`, and each layer has a `relpos_bias` of its
own; `scan_layers=False` there gives the unscanned names with heads apart.
"""

import re
from collections.abc import Callable

import numpy as np

from specjax.checkpoints.arrays import ArraySpec, Piece, Reader, same_values

_SCANNED = re.compile(r"(encoder|decoder)/\1/(.+)")
_MOST_LAYERS = 10_000
_LAYER_BIAS = re.compile(r"(encoder|decoder)/layers_\d+/(relpos_bias/rel_embedding)")


class Layer:
    """Takes one layer of a stacked array, as a view.

    Args:
      number: of the layer.
      axis: of the layers.
    """

    def __init__(self, number: int, axis: int) -> None:
        self.number, self.axis = number, axis

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The layer's part of `array`."""
        return np.moveaxis(array, self.axis, 0)[self.number]


class Tree:
    """The unscanned tree in a checkpoint of either form.

    Args:
      reader: the open checkpoint.

    Attributes:
      pieces: where each parameter comes from.
      specs: shape and dtype of each.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.pieces: dict[str, Piece] = {}
        self.specs: dict[str, ArraySpec] = {}
        for source, spec in reader.specs.items():
            match = _SCANNED.fullmatch(source)
            axis = _scan_axis(reader, match[1]) if match else 0
            if match is None or len(spec.shape) <= axis:
                self._add(source, source, spec.shape, _whole)
                continue
            if spec.shape[axis] > _MOST_LAYERS:
                raise ValueError(
                    f"{reader.directory}: {source}, whose shape is said to be {spec.shape}, would "
                    f"have {spec.shape[axis]:,} layers, more than any network; copy it again"
                )
            shape = spec.shape[:axis] + spec.shape[axis + 1 :]
            for i in range(spec.shape[axis]):
                self._add(f"{match[1]}/layers_{i}/{match[2]}", source, shape, Layer(i, axis))

    def _add(
        self,
        name: str,
        source: str,
        shape: tuple[int, ...],
        take: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        merged = _merged(name, shape)
        self.specs[name] = ArraySpec(merged, self._reader.specs[source].dtype)
        self.pieces[name] = Piece(source, lambda array: take(array).reshape(merged))

    def share_biases(self) -> None:
        """Puts one relative position bias per stack in the place of equal ones per layer.

        Only if those of both stacks are: a model has either form.
        """
        layers = [name for name in self.specs if _LAYER_BIAS.fullmatch(name)]
        wanted = list(dict.fromkeys(self.pieces[name].source for name in layers))
        arrays = dict(self._reader.arrays(wanted))
        first: dict[str, np.ndarray] = {}
        for name in layers:
            piece = self.pieces[name]
            value = np.ascontiguousarray(piece.view(arrays[piece.source]))
            if not same_values(value, first.setdefault(name.split("/")[0], value)):
                return
        for name in layers:
            stack, bias = name.split("/")[0], "relpos_bias/rel_embedding"
            self.pieces.setdefault(f"{stack}/{bias}", self.pieces.pop(name))
            self.specs.setdefault(f"{stack}/{bias}", self.specs.pop(name))


def _whole(array: np.ndarray) -> np.ndarray:
    """The array itself, which may be a traced one."""
    return array


def _merged(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with heads merged: `out` kernels hold them first, the others last."""
    if len(shape) != 3 or not name.endswith("/kernel"):
        return shape
    a, b, c = shape
    return (a * b, c) if name.endswith("/out/kernel") else (a, b * c)


def _scan_axis(reader: Reader, stack: str) -> int:
    """1 by default; T5X's `param_scan_axis` may also be 0, which a norm's scale (E, L) shows."""
    embedding = reader.specs.get("token_embedder/embedding")
    norm = reader.specs.get(f"{stack}/{stack}/pre_mlp_layer_norm/scale")
    if embedding is None or norm is None or len(norm.shape) != 2:
        return 1
    return 1 if norm.shape[0] == embedding.shape[-1] else 0
