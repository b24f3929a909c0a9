"""Files that can only be read from the first record to the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ForwardFile"]


class ForwardFile:
    """Records by number. Asking for the last one again is free; going further back reads the file from its start.

    Parameters
    ----------
    path
        The file, for messages.
    open_file
        Opens the file: an iterator over its records, with a method `close`.
    decode
        What to make of a record and its number.
    """

    def __init__(self, path: Path, open_file: Callable[[], Any], decode: Callable[[Any, int], Any]) -> None:
        self._path, self._open, self._decode = path, open_file, decode
        self._file: Any = None
        self._at = -1
        self._value: Any = None
        self._closed = False

    def get(self, record: int) -> Any:
        """The record of a number."""
        if self._closed:
            raise ValueError(f"{str(self._path)!r} is closed: open it again.")
        if self._file is not None and record == self._at:
            return self._value
        if self._file is None or record < self._at:
            self.rewind()
            self._file = self._open()
        for found in self._file:
            self._at += 1
            if self._at == record:
                self._value = self._decode(found, record)
                return self._value
        raise ValueError(f"it ends before record {record + 1:,}")

    def rewind(self) -> None:
        """Begin anew with the next record that is asked for."""
        if self._file is not None:
            self._file.close()
        self._file, self._value, self._at = None, None, -1

    def close(self) -> None:
        """Close the file. May be called again."""
        self.rewind()
        self._closed = True
