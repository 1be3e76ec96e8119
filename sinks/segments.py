"""The closed segments of a rotated file: ``events.jsonl.0001``, ``events.jsonl.0002.gz`` …, the oldest first."""

from __future__ import annotations

import glob
import gzip
import logging
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["Compressor", "compress", "rotate", "segments"]

_log = logging.getLogger(__name__)
_SUFFIX = re.compile(r"\.(\d{4,})(\.gz)?$")


def segments(path: Path) -> list[Path]:
    """Return the closed segments of `path` in order; where a segment exists twice, the compressed one."""
    found: dict[int, Path] = {}
    for candidate in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
        match = _SUFFIX.match(candidate.name, len(path.name))
        if match:
            found[int(match[1])] = candidate  # "….gz" sorts after its plain twin, and is whole: it was renamed
    return [found[number] for number in sorted(found)]


def rotate(path: Path) -> None:
    """Rename `path` to be its newest closed segment."""
    closed = segments(path)
    newest = max((int(match[1]) for match in map(_number, closed) if match), default=0)
    os.rename(path, f"{path}.{newest + 1:04d}")


def compress(path: Path) -> None:
    """Gzip the closed segments of `path` that are not yet, each under another name first."""
    for segment in segments(path):
        plain, packed = _twins(segment)
        if not packed.exists():
            partial = Path(f"{packed}.tmp")
            with open(plain, "rb") as source, open(partial, "wb") as target:
                with gzip.GzipFile(plain.name, "wb", fileobj=target) as zipped:
                    shutil.copyfileobj(source, zipped, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            os.replace(partial, packed)
        plain.unlink(missing_ok=True)


def _number(segment: Path) -> re.Match[str] | None:
    return _SUFFIX.search(segment.name)


def _twins(segment: Path) -> tuple[Path, Path]:
    plain = segment.with_suffix("") if segment.suffix == ".gz" else segment
    return plain, Path(f"{plain}.gz")


class Compressor:
    """Gzips the closed segments of one file in a thread, which neither the writes nor the end of the process await."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless a run is under way (what it misses, the next one finds)."""
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name="trainbus-gzip", daemon=True)
        with suppress(RuntimeError):  # the interpreter is exiting: the next session does it
            thread.start()
            self._thread = thread

    def finish(self) -> None:
        """Wait until every closed segment is compressed."""
        if self._thread is not None:
            self._thread.join()
        self._run()

    def _run(self) -> None:
        try:
            compress(self._path)
        except OSError as error:
            _log.warning("A segment of %s stays uncompressed: %s", self._path, error.strerror or error)
