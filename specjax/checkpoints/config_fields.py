"""Checked reading of the fields of a Hugging Face `config.json`."""

from pathlib import Path
from typing import Any


class ConfigFields:
    """The values of one config.json, with errors that name the file and the field.

    Args:
      values: the JSON object.
      path: of the file.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def number(self, name: str, *default: float | None) -> Any:
        """A finite number, or the default where the field is absent or null."""
        value = self.values.get(name)
        if value is None and default:
            return default[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.path}: {name}={value!r} must be a number")
        # A whole number of more digits than a float holds is none that a network has.
        if not abs(value) < 1e300:
            raise ValueError(f"{self.path}: {name}={repr(value)[:40]} must be finite")
        return value

    def positive(self, name: str, *default: float | None) -> Any:
        """A number above 0."""
        value = self.number(name, *default)
        if value is not None and value <= 0:
            raise ValueError(f"{self.path}: {name}={value!r} must be above 0")
        return value

    def whole(self, name: str, *default: int, least: int = 1) -> int:
        """A whole number, at least `least`."""
        value = self.number(name, *default)
        if not float(value).is_integer() or value < least:
            raise ValueError(f"{self.path}: {name}={value!r} must be a whole number >= {least}")
        return int(value)

    def check_token(self, name: str, rows: int) -> None:
        """Raises where an id, or one of several, is not below the number of rows."""
        value = self.values.get(name)
        for token in value if isinstance(value, list) else [value]:
            # Other types are refused where the ids are read.
            if isinstance(token, int) and token >= rows:
                raise ValueError(
                    f"{self.path}: {name}={value!r} must be below vocab_size={rows}; correct it"
                )

    def refuse(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raises unless the field, or its default, has one of the allowed values."""
        value = self.values.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise ValueError(
                f"{self.path}: {name}={value!r} is not supported, only "
                f"{' or '.join(repr(a) for a in allowed)}"
            )
