"""The settings of a trainer."""

import dataclasses

import jax

from specjax.checks import checked, whole_number
from specjax.training.optimizer import AdamW


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and by what updates a run trains, and what it tells and keeps.

    Attributes:
      num_steps: updates in all; may be raised to prolong a finished run.
      optimizer: the optimiser and its schedule.
      ema_decay: of the running average of the parameters, which is what is evaluated and exported,
        in [0, 1); 0 for none. It starts smaller: min(decay, (1 + step) / (10 + step)).
      seed: of the initial parameters, the order of the data and dropout.
      checkpoint_every: updates between checkpoints; each one is evaluated.
      log_every: updates between lines of the log.
      num_devices: devices that share each batch's rows; all of the process's by default.
      allow_other_streams: continue a run though another version of a package draws other random
        numbers than the run began with.
      choose_by: the validation figure whose best checkpoint is the result: "loss", the lowest of
        which is best, or another one that is logged as `validation_<choose_by>`, such as
        "accuracy", the highest of which is.
      progress: whether to tell progress on stderr.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range.
    """

    num_steps: int
    optimizer: AdamW
    ema_decay: float = 0.999
    seed: int = 0
    checkpoint_every: int = 500
    log_every: int = 50
    num_devices: int | None = None
    allow_other_streams: bool = False
    choose_by: str = "loss"
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"num_steps": 1, "seed": 0, "checkpoint_every": 1, "log_every": 1}
        if self.num_devices is not None:
            least["num_devices"] = 1
        for name, low in least.items():
            value = whole_number(name, getattr(self, name), low=low)
            object.__setattr__(self, name, value)  # 1e4 has become 10000
        checked("ema_decay", self.ema_decay, low=0.0, high=1.0, open_high=True)
        if not isinstance(self.optimizer, AdamW):
            raise TypeError(f"`optimizer` must be an AdamW, got {self.optimizer!r}")
        for name in ("allow_other_streams", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.choose_by, str):
            raise TypeError(
                f"`choose_by` must be the name of a figure, such as 'loss', got {self.choose_by!r}"
            )

    def devices(self) -> list[jax.Device]:
        """The devices that share a batch.

        Raises:
          ValueError: there are not so many.
        """
        devices = jax.devices()
        if self.num_devices is not None and self.num_devices > len(devices):
            raise ValueError(
                f"`num_devices` must be at most {len(devices)}, the devices of this process, got "
                f"{self.num_devices}"
            )
        return devices[: self.num_devices]
