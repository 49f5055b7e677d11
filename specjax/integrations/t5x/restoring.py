"""Restores a pair from two T5X checkpoints, each from its own path, with T5X's own code."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import core as flax_core
from t5x import checkpoints, state_utils

from specjax.checkpoints.arrays import flatten
from specjax.errors import UserError

ROLES = ("verifier", "drafter")
_REMEDY = "give the gin file that it was trained with"
# Characters of an error of T5X or Orbax.
_LONGEST = 500


class PairCheckpointManager:
    """Restores the verifier and the drafter, each from its own checkpoint.

    Bind it as `utils.RestoreCheckpointConfig.checkpoint_manager_cls`, whose `path` is the
    verifier's. T5X's own manager reads both checkpoints, so it supports the same formats, and
    parameters are read directly into their shards. `RestoreCheckpointConfig`'s assignment map and
    transformations apply to the verifier's checkpoint.

    Args:
      directory: passed by T5X.
      train_state: the shapes of both networks' parameters.
      partitioner: T5X's.
      drafter_path: the drafter's checkpoint, or the directory around it (then the latest); None:
        the verifier's path has both, as written by `specjax convert --drafter`.
      drafter_transformations: for the drafter's state, like `state_transformation_fns`.
      **options: passed on to T5X's own manager.
    """

    def __init__(
        self,
        directory: str | Sequence[str],
        train_state: Any,
        partitioner: Any,
        *,
        drafter_path: str | None = None,
        drafter_transformations: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self._train_state, self._partitioner, self._options = train_state, partitioner, options
        self._is_pair = set(train_state.params) == set(ROLES)
        if drafter_path is not None and not self._is_pair:
            raise UserError(
                f"DRAFTER_CHECKPOINT_PATH must be None, got {drafter_path!r}: the model has no "
                "drafting network: leave DRAFTER_CHECKPOINT_PATH out"
            )
        self._drafter_path = drafter_path
        self._drafter_transformations = drafter_transformations

    def restore(
        self,
        step: int | None = None,
        path: str | None = None,
        fallback_state: Mapping[str, Any] | None = None,
        state_transformation_fns: Sequence[Any] = (),
        lazy_parameters: bool = False,
    ) -> Any:
        """Restores both checkpoints into T5X's train state; `path` is the verifier's.

        `fallback_state` has values of parameters that a checkpoint lacks, and
        `state_transformation_fns` are for the verifier's state.
        """
        assert step is None and path is not None, "T5X passes paths"
        role = "pair" if self._is_pair and self._drafter_path is None else "verifier"
        path = checkpoint_at(role, path)
        if self._drafter_path is None:
            return self._restore_one(
                role, self._train_state, path, fallback_state, state_transformation_fns
            )
        paths = (path, checkpoint_at("drafter", self._drafter_path))
        transformations = (state_transformation_fns, self._drafter_transformations)
        states = [
            self._restore_one(
                role,
                part_of(self._train_state, role),
                where,
                _part_of_dict(fallback_state, role),
                functions,
            )
            for role, where, functions in zip(ROLES, paths, transformations, strict=True)
        ]
        parts = {
            field: {role: getattr(state, field) for role, state in zip(ROLES, states, strict=True)}
            for field in ("params", "flax_mutables")
        }
        whole = self._train_state.replace_step(states[0].step)
        whole = whole.replace_params(_like(self._train_state.params, parts["params"]))
        if jax.tree.leaves(self._train_state.flax_mutables):
            mutables = _like(self._train_state.flax_mutables, parts["flax_mutables"])
            whole = whole.replace_flax_mutables(mutables)
        return whole

    def restore_from_tf_checkpoint(self, path: str, strict: bool = True) -> Any:
        # A checkpoint of Mesh TensorFlow has only one network.
        raise UserError(
            f"{path} is a TensorFlow checkpoint: convert it with T5X's convert_tf_checkpoint first"
        )

    def _restore_one(
        self, role: str, shapes: Any, path: str, fallback: Any, transformations: Sequence[Any]
    ) -> Any:
        manager = checkpoints.OrbaxCheckpointManagerInterface(
            directory=path, train_state=shapes, partitioner=self._partitioner, **self._options
        )
        wanted = flatten(flax_core.unfreeze(shapes.params))

        def compare(state: Any, _: Any) -> Any:
            # T5X ignores parameters that the network lacks: the outputs would be wrong.
            names = set(state_utils.flatten_state_dict(state.get("target", {})))
            missing = sorted(set(wanted) - names) if fallback is None else []
            unknown = [] if transformations else sorted(names - set(wanted))
            if missing or unknown:
                raise _MisfitError(_names_differ(role, path, names, missing, unknown))
            return state

        try:
            restored = manager.restore(
                path=path,
                fallback_state=fallback,
                state_transformation_fns=[*transformations, compare],
            )
        except _MisfitError as error:
            raise UserError(str(error)) from None
        except (KeyError, ValueError) as error:
            other = ", or give DRAFTER_CHECKPOINT_PATH" if role == "pair" else ""
            raise UserError(
                f"the {role}'s checkpoint {path} cannot be restored into its network "
                f"({' '.join(str(error).split())[:_LONGEST]}): {_REMEDY}{other}"
            ) from error
        # Orbax returns the checkpoint's shapes, whatever the network's.
        arrays = flatten(flax_core.unfreeze(restored.params))
        wrong = [name for name in sorted(wanted) if arrays[name].shape != wanted[name].shape]
        if wrong:
            first = wrong[0]
            raise UserError(
                f"the {role}'s checkpoint {path} does not fit its network: {first} has shape "
                f"{arrays[first].shape} in the checkpoint, {wanted[first].shape} in the network "
                f"({len(wrong)} of {len(wanted)} arrays differ): {_REMEDY}"
            )
        return restored


class _MisfitError(Exception):
    """A checkpoint's arrays are not those of the network."""


def _names_differ(
    role: str, path: str, names: Collection[str], missing: list[str], unknown: list[str]
) -> str:
    parts = {name.partition("/")[0] for name in names}
    if role == "pair" and not parts.issuperset(ROLES):
        return (
            f"the checkpoint {path} has one network, but the model has a verifier and a drafter: "
            "give DRAFTER_CHECKPOINT_PATH, or write one checkpoint with `specjax convert VERIFIER "
            "PAIR --drafter DRAFTER --to t5x`"
        )
    if role != "pair" and parts == set(ROLES):
        return (
            f"the {role}'s checkpoint {path} has both networks: leave DRAFTER_CHECKPOINT_PATH out, "
            "or, without a drafting network, give the verifier's own checkpoint"
        )
    kinds = {"lacks": missing, "also has": unknown}
    differences = [
        f"it {verb} {which[0]}{f' and {len(which) - 1} more' if which[1:] else ''}"
        for verb, which in kinds.items()
        if which
    ]
    return (
        f"the {role}'s checkpoint {path} does not fit its network: {', '.join(differences)}: "
        f"{_REMEDY}"
    )


def checkpoint_at(role: str, path: str) -> str:
    """A checkpoint's directory, or the latest checkpoint in a model's directory.

    The path may be any that T5X's file system supports (gs://). `role` is for messages.
    """
    if not isinstance(path, str | os.PathLike):  # T5X also takes lists
        raise UserError(f"the {role}'s checkpoint must be a path, got {path!r}")
    path = os.fspath(path).rstrip("/")
    if not checkpoints.gfile.exists(path):
        raise FileNotFoundError(f"the {role}'s checkpoint {path} does not exist: check the path")
    if checkpoints.gfile.exists(os.path.join(path, "checkpoint")) or checkpoints.gfile.exists(
        os.path.join(path, "state")
    ):
        return path
    steps = checkpoints.all_steps(path)
    if not steps:
        raise FileNotFoundError(
            f"the {role}'s checkpoint {path} has no checkpoint_<step>: give a T5X checkpoint"
        )
    return os.path.join(path, f"checkpoint_{steps[-1]}")


def part_of(train_state: Any, role: str) -> Any:
    """The part of T5X's train state that belongs to a network."""
    fields = {
        name: getattr(train_state, name)[role]
        for name in ("params", "params_axes", "flax_mutables", "flax_mutables_axes")
        if getattr(train_state, name)
    }
    return train_state.replace(**fields)


def _part_of_dict(state: Mapping[str, Any] | None, role: str) -> Any:
    if state is None:
        return None
    return {
        name: value[role] if isinstance(value, Mapping) and role in value else value
        for name, value in state.items()
    }


# Frozen if T5X's own tree is.
def _like(tree: Any, value: dict[str, Any]) -> Any:
    value = {role: flax_core.unfreeze(part) for role, part in value.items()}
    return flax_core.freeze(value) if isinstance(tree, flax_core.FrozenDict) else value
