"""Files that are written whole or not at all, and lines of text files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to; it takes the name `path` when the block ends, and is gone if it raises.

    It lies in the same folder (a rename must not cross file systems) and keeps the suffix, by which
    some writers choose a format.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def lines_of(path: str | os.PathLike) -> list[str]:
    """Lines of a UTF-8 file. Only line feeds end them (or CR LF): `str.splitlines` also splits at
    U+2028 and the like, which stand in the strings of valid JSON.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got {error}, expected text in UTF-8") from None
