"""The script that was started, for a child process that needs something defined in it."""

from __future__ import annotations

import ast
import io
import sys
from importlib.util import find_spec
from types import CodeType, ModuleType

import msgspec

from eventbus.errors import EventBusError, SubscriptionError

__all__ = ["MAIN", "MainScript", "check_main", "load_main", "main_script"]

#: What the started script is called, here and in a child (where multiprocessing calls it so too).
MAIN = ("__main__", "__mp_main__")


class MainScript(msgspec.Struct, frozen=True, array_like=True):
    """Where the code of the started script is: the name it was started by with ``python -m``, else its file."""

    name: str | None
    path: str


def main_script() -> MainScript | None:
    """The started script, or None where a child cannot import it: a notebook, a REPL, ``python -c``."""
    main = sys.modules.get("__main__")
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or hasattr(sys, "ps1") or _source(path) is None:
        return None
    return MainScript(spec.name if spec is not None else None, path)


def check_main(subscriber: str) -> None:
    """Raise `SubscriptionError` where importing the started script would fail, or do again what it does."""
    script = main_script()
    if script is None:
        raise SubscriptionError(
            subscriber,
            "is defined in an interactive session (a notebook, a REPL, python -c), which a child process cannot import",
            "Put it into a module, a .py file of its own, and import it from there.",
        )
    if not _is_guarded(_source(script.path) or ""):
        raise SubscriptionError(
            subscriber,
            f"is defined in {script.path}, which its child process imports and which has no "
            '`if __name__ == "__main__":`',
            "Put what the script does below that line, or the subscriber into a module of its own.",
        )


def load_main(script: MainScript | None) -> ModuleType:
    """In a child: import the started script under the name ``__mp_main__``, once."""
    loaded = sys.modules.get("__mp_main__")
    if loaded is not None:
        return loaded
    if script is None:
        raise EventBusError("The script that was started cannot be imported here.")
    module = ModuleType("__mp_main__")
    module.__file__ = script.path
    code = _code(script, module)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)  # noqa: S102  # as the import of any other module does
    return module


def _code(script: MainScript, module: ModuleType) -> CodeType:
    spec = find_spec(script.name) if script.name is not None else None
    if spec is not None and spec.name != "__main__":  # started with python -m: its relative imports need its package
        module.__spec__, module.__package__ = spec, spec.parent
    with io.open_code(script.path) as file:
        return compile(file.read(), script.path, "exec")


def _source(path: str) -> str | None:
    try:
        with io.open_code(path) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return None


def _is_guarded(source: str) -> bool:
    """Whether the script does only under ``if __name__ == "__main__":`` what a child must not do again."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return True  # it runs here, so this is no Python that we know to read
    tests = [ast.unparse(node.test) for node in body if isinstance(node, ast.If)]
    return any("__name__" in test and "__main__" in test for test in tests)
