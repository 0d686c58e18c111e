"""Reading JSON that people may have edited: every mistake has a file and a place in it.

:func:`read` gives the outermost :class:`Place` of a file; from there on, whoever reads asks
for fields and items of a type and gets either the value or a :class:`ValueError` of one line
like ``trace.json: events[3].unit: is 7, not a text``. What a file means is not known here:
see :mod:`fsdp_fx.saved`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

__all__ = ["Place", "read"]

# Longer values are cut in messages.
_SHOWN = 40


@dataclass(frozen=True)
class Place:
    """A value in a JSON file, and where it stands.

    Args:
        file: the file, as messages name it.
        path: the place in it, for example ``events[3].unit``; empty for the whole file.
        value: what stands there.
    """

    file: str
    path: str
    value: object

    @property
    def shown(self) -> str:
        """The value for a message: on one line, and not long."""
        return _shown(self.value)

    def fail(self, problem: str) -> NoReturn:
        """Say that what stands here is wrong.

        Raises:
            ValueError: always; names the file, the place and ``problem``.
        """
        raise ValueError(": ".join(part for part in (self.file, self.path, problem) if part))

    def field(self, name: str) -> Place:
        """The value of a field of the object that stands here.

        Raises:
            ValueError: there is no object, or it lacks the field.
        """
        found = self.optional(name)
        if found is None:
            self.fail(f"has no field {json.dumps(name)}")
        return found

    def optional(self, name: str) -> Place | None:
        """The same, or None if the object lacks the field.

        Raises:
            ValueError: there is no object.
        """
        fields = self._object()
        if name not in fields:
            return None
        path = f"{self.path}.{name}" if self.path else name
        return Place(self.file, path, fields[name])

    def only(self, *names: str) -> None:
        """Refuse fields of the object that stands here which nobody reads: misspelled ones.

        Args:
            names: the fields that there are.

        Raises:
            ValueError: there is no object, or it has another field.
        """
        for name in self._object():
            if name not in names:
                known = ", ".join(names)
                self.fail(f"has an unknown field {_shown(name)}; there are {known}")

    def fields(self) -> Iterator[tuple[str, Place]]:
        """The fields of the object that stands here: names, and the values.

        Raises:
            ValueError: there is no object.
        """
        for name, value in self._object().items():
            yield name, Place(self.file, f"{self.path}[{_shown(name)}]", value)

    def items(self) -> Iterator[Place]:
        """The items of the list that stands here.

        Raises:
            ValueError: there is no list.
        """
        if not isinstance(self.value, list):
            self.fail(f"is {self.shown}, not a list")
        for index, value in enumerate(self.value):
            yield Place(self.file, f"{self.path}[{index}]", value)

    def text(self) -> str:
        """The text that stands here.

        Raises:
            ValueError: something else does.
        """
        if not isinstance(self.value, str):
            self.fail(f"is {self.shown}, not a text")
        return self.value

    def truth(self) -> bool:
        """Whether ``true`` stands here.

        Raises:
            ValueError: neither ``true`` nor ``false`` does.
        """
        if not isinstance(self.value, bool):
            self.fail(f"is {self.shown}, not true or false")
        return self.value

    def integer(self, least: int = 0, most: int | None = None) -> int:
        """The integer that stands here.

        Args:
            least: the smallest that is allowed.
            most: the largest that is allowed; None for no limit.

        Raises:
            ValueError: something else stands here, or an integer that is not allowed.
        """
        # A truth value is an int in Python, not in JSON.
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self.fail(f"is {self.shown}, not an integer")
        if self.value < least or (most is not None and self.value > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            self.fail(f"is {self.shown}; it must be {allowed}")
        return self.value

    def _object(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            self.fail(f"is {self.shown}, not an object")
        return self.value


def read(path: str | os.PathLike[str]) -> Place:
    """What stands in a JSON file.

    Args:
        path: the file.

    Returns:
        The whole of it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON; one line that names the file.
    """
    name = os.fspath(path)
    content = Path(path).read_bytes()
    try:
        return Place(name, "", json.loads(content))
    except json.JSONDecodeError as error:
        # Its own message would count characters, too.
        raise ValueError(
            f"{name}: is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not JSON: it is not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{name}: is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error


def _shown(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case int() if not isinstance(value, bool) and value.bit_length() > 100:
            return "a very large integer"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
