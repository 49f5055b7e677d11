"""Restores a pair from two checkpoints of T5X, each from its own path, by T5X's own code."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import core as flax_core
from t5x import checkpoints

ROLES = ("verifier", "drafter")


class PairCheckpointManager:
    """Restores the verifier and the drafter, each from its own checkpoint.

    To be bound as `utils.RestoreCheckpointConfig.checkpoint_manager_cls`, whose `path` is the
    verifier's. T5X's own manager reads both, so what it can read can be paired, and parameters go
    straight into their shards. `RestoreCheckpointConfig`'s assignment map and transformations are
    for the verifier's checkpoint.

    Args:
      directory: what T5X passes.
      train_state: the shapes of both networks' parameters.
      partitioner: T5X's.
      drafter_path: the drafter's checkpoint, or the directory around it (the latest is taken);
        None: the one path holds both, as `specjax convert --drafter` writes it.
      drafter_transformations: of the drafter's state, as `state_transformation_fns` are.
      **options: what T5X passes to its own manager.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if there is a path for a drafter that the model does not have.
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
            raise ValueError(
                f"drafter_path must be None, got {drafter_path!r}: there is no drafting network: "
                "leave DRAFTER_CHECKPOINT_PATH out"
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
        """Restores both.

        Args:
          step: must be None; T5X passes paths.
          path: the verifier's checkpoint.
          fallback_state: what parameters get that a checkpoint lacks.
          state_transformation_fns: of the verifier's state.
          lazy_parameters: see T5X.

        Returns:
          T5X's train state.

        Raises:
          FileNotFoundError: if a checkpoint is not there.
          ValueError: if it does not fit its network.
        """
        if step is not None or path is None:
            raise ValueError("path must be given, and step left out")
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
        """Raises ValueError: a checkpoint of Mesh TensorFlow holds one network."""
        raise ValueError(
            f"{path} is a TensorFlow checkpoint: convert it with T5X's convert_tf_checkpoint first"
        )

    def _restore_one(
        self, role: str, shapes: Any, path: str, fallback: Any, transformations: Sequence[Any]
    ) -> Any:
        manager = checkpoints.OrbaxCheckpointManagerInterface(
            directory=path, train_state=shapes, partitioner=self._partitioner, **self._options
        )
        try:
            return manager.restore(
                path=path, fallback_state=fallback, state_transformation_fns=transformations
            )
        except (KeyError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            other = ", or give DRAFTER_CHECKPOINT_PATH" if role == "pair" else ""
            raise ValueError(
                f"the {role}'s checkpoint {path} cannot be restored into its network ({first}): "
                f"give the gin file that it was trained with{other}"
            ) from error


def checkpoint_at(role: str, path: str) -> str:
    """A checkpoint's directory, or the latest one in a model's directory.

    Args:
      role: whose it is, for the message.
      path: what the user gave; local, or whatever T5X's file system knows (gs://).

    Raises:
      FileNotFoundError: if there is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"the {role}'s checkpoint must be one path, got {path!r}")
    path = os.fspath(path).rstrip("/")
    if not checkpoints.gfile.exists(path):
        raise FileNotFoundError(f"the {role}'s checkpoint {path} is not there: check the path")
    if checkpoints.gfile.exists(os.path.join(path, "checkpoint")) or checkpoints.gfile.exists(
        os.path.join(path, "state")
    ):
        return path
    steps = checkpoints.all_steps(path)
    if not steps:
        raise FileNotFoundError(
            f"the {role}'s checkpoint {path} holds no checkpoint_<step>: give a T5X checkpoint"
        )
    return os.path.join(path, f"checkpoint_{steps[-1]}")


def part_of(train_state: Any, role: str) -> Any:
    """The part of T5X's train state that is one network's."""
    fields = {
        name: getattr(train_state, name)[role]
        for name in ("params", "params_axes", "flax_mutables", "flax_mutables_axes")
        if getattr(train_state, name)
    }
    return train_state.replace(**fields)


def _part_of_dict(state: Mapping[str, Any] | None, role: str) -> Any:
    """The part of a state dict that is one network's; what belongs to both stays."""
    if state is None:
        return None
    return {
        name: value[role] if isinstance(value, Mapping) and role in value else value
        for name, value in state.items()
    }


def _like(tree: Any, value: dict[str, Any]) -> Any:
    """`value` frozen or not, as T5X's own tree is."""
    value = {role: flax_core.unfreeze(part) for role, part in value.items()}
    return flax_core.freeze(value) if isinstance(tree, flax_core.FrozenDict) else value
