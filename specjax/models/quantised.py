"""The forms of matrices in fewer bits that users choose by a name."""

from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError
from specjax.models.int4 import GROUP, Int4Embedding, Int4Weight
from specjax.models.int8 import Int8Embedding, Int8Weight
from specjax.models.weights import is_stack

FORMS = ("int8", "int8+embedding", "int4", "int4+embedding")
_TABLE, _INPUTS = "token_embedder/embedding", "layer_inputs/embedding"

QuantisedWeight = Int8Weight | Int4Weight


def quantised_form(
    path: str, shape: tuple[int, ...], form: str | None
) -> type[QuantisedWeight] | None:
    """The class of a quantised parameter; None for a parameter that is left as it is.

    Args:
      path: of the parameter, such as "decoder/layers_0/mlp/wo/kernel".
      shape: its shape.
      form: one of `FORMS`; None leaves everything.
    """
    if form is None:
        return None
    if len(shape) == 2 and path.endswith("/kernel"):
        return Int4Weight if form.startswith("int4") and shape[0] % GROUP == 0 else Int8Weight
    if is_stack(path, shape):
        return Int8Weight
    if path == _TABLE and form == "int4+embedding" and shape[1] % GROUP == 0:
        return Int4Embedding
    return Int8Embedding if path in (_TABLE, _INPUTS) and form != "int8" else None


def check_form(value: Any, name: str = "weights") -> str | None:
    """The form of matrices that a user gives: one of `FORMS`, or None."""
    if value is not None and not (isinstance(value, str) and value in FORMS):
        raise UserError(f"`{name}` must be one of {', '.join(FORMS)}, or None, got {value!r}")
    return value


def form_of(weights: Any, model: str) -> str | None:
    """The form of a model's matrices.

    Args:
      weights: a form for all models, or a mapping from names of models to forms; a model without
        an entry is left as it is.
      model: the name of the model.
    """
    if not isinstance(weights, Mapping):
        return check_form(weights)
    return check_form(weights.get(model), f"weights[{model!r}]")
