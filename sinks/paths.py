"""Where a file sink writes: a path that may hold ``{run}`` and ``{rank}``."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["PathTemplate"]

_BRACES = re.compile(r"\{[^{}]*\}|[{}]")
_FIELDS = ("{run}", "{rank}")
_NOT_IN_A_NAME = re.compile(r"[\x00-\x1f\\]")


class PathTemplate:
    """A path with fields, anchored at the directory that is current now, so that a later ``chdir`` moves nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text: object = os.fspath(path)
        if not isinstance(text, str) or not text:
            raise ValueError(f"A sink's path must be a non-empty string or path, not {path!r}.")
        self.text = text
        for braces in _BRACES.findall(self.text):
            if braces not in _FIELDS:
                raise ValueError(
                    f"The path {self.text!r} holds {braces!r}. Only {{run}} and {{rank}} can be filled in."
                )
        self.is_fixed = not any(field in self.text for field in _FIELDS)
        self._base = Path.cwd()

    def fill(self, run: str | None, rank: int | None) -> Path:
        """Return the path of one run and rank. A run named ``a/b`` gets a folder; none can lead out of its place."""
        name = _inside(run) if run is not None else "unknown"
        return self._base / self.text.replace("{run}", name).replace("{rank}", str(rank or 0))


def _inside(run: str) -> str:
    parts = [part for part in _NOT_IN_A_NAME.sub("_", run).split("/") if part]
    return "/".join("_" * len(part) if part in (".", "..") else part for part in parts) or "_"
