"""Runs of training that are interrupted at a record, or after a checkpoint."""

import contextlib

from specjax.runs.run_directory import Store
from specjax.training.checkpoint_store import CheckpointStore


@contextlib.contextmanager
def while_it_writes(monkeypatch, count):
    """Interrupts in the place of the record `count`, from 1."""
    put, calls = Store.put, []

    def stop(self, *record):
        calls.append(record)
        if len(calls) == count:
            raise KeyboardInterrupt
        put(self, *record)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", stop)
        yield


@contextlib.contextmanager
def while_it_trains(monkeypatch):
    """Interrupts after the first checkpoint."""
    save = CheckpointStore.save

    def stop(self, state, loss):
        save(self, state, loss)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", stop)
        yield
