"""How a function or a sink gets to a child process: a function by its name, anything else pickled."""

from __future__ import annotations

import io
import os
import pickle
import sys
from importlib import import_module
from types import FunctionType
from typing import Any

from eventbus.errors import SubscriptionError
from eventbus.main_script import MAIN, MainScript, check_main, load_main

__all__ = ["check_importable", "dump", "load", "load_name", "where_defined"]


def check_importable(target: Any, subscriber: str) -> None:
    """Raise `SubscriptionError` where a child process cannot get at a function or a sink."""
    if not hasattr(os, "posix_spawn"):
        raise SubscriptionError(
            subscriber, "cannot run in a process on this platform, which has no posix_spawn", 'Use run_in="thread".'
        )
    where = where_defined(target)
    if where is not None:
        raise _not_importable(subscriber, f"is {where}")
    try:
        data = dump(target)
    except Exception as error:
        raise _not_importable(subscriber, f"does not pickle ({type(error).__name__}: {error})") from error
    if any(name.encode() in data for name in MAIN):
        check_main(subscriber)


def _not_importable(subscriber: str, why: str) -> SubscriptionError:
    return SubscriptionError(
        subscriber,
        f'{why}, so its child process cannot import it for run_in="process"',
        'Define it at the top of an importable module, or use run_in="thread".',
    )


def where_defined(target: object) -> str | None:
    """What keeps a function from being imported by its name; None when nothing does."""
    name = getattr(target, "__qualname__", "")
    if name.endswith("<lambda>"):
        return "a lambda"
    return f"defined inside of a function ({name})" if "<locals>" in name else None


def dump(target: Any) -> bytes:
    """The function's name, or the pickled object.

    By its name alone, since a decorator asks for it before the module has it.
    """
    if isinstance(target, FunctionType) and target.__module__ is not None:
        return pickle.dumps((target.__module__, target.__qualname__))
    return pickle.dumps((None, pickle.dumps(target)))


def load(data: bytes, main: MainScript | None) -> Any:
    """In the child: what `dump` was given."""
    module, what = pickle.loads(data)  # from the process that started this one
    return _Unpickler(what, main).load() if module is None else load_name(module, what, main)


def load_name(module: str, qualname: str, main: MainScript | None) -> Any:
    """In the child: what a module calls by this name."""
    found: Any = load_main(main) if module in MAIN else import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, main: MainScript | None) -> None:
        super().__init__(io.BytesIO(data))
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module in MAIN and "__mp_main__" not in sys.modules:
            load_main(self._main)
        return super().find_class(module, name)
