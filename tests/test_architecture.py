"""The rules that keep the three packages apart, small and importable."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("eventbus", "sinks", "trainer")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULE = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TABLES = {"eventbus/events.py"}  # one record after the other: long, and read by searching

# Per package, what no module of it may import, at its top or inside a function.
FORBIDDEN = {
    "eventbus": {"aiofiles", "httpx", "numpy", "sinks", "torch", "trainer"},
    "sinks": {"torch", "trainer"},
    "trainer": {"sinks"},
}
# The table of event types, the running buses for the one exit hook, the number of forks.
STATE = {
    ("eventbus/event.py", "_classes"),
    ("eventbus/exits.py", "running"),
    ("eventbus/exits.py", "_forks"),
}
# Calls at module level whose result is no place to keep state.
STATELESS = {
    "attrgetter",
    "bytes",
    "compile",
    "float",
    "frozenset",
    "getLogger",
    "int",
    "itemgetter",
    "object",
    "tuple",
}
MUTABLE_CLASSES = {"Condition", "Counter", "Event", "Lock", "OrderedDict", "Queue", "RLock", "Semaphore", "SimpleQueue"}
MUTABLE_CLASSES |= {"Thread", "ThreadPoolExecutor", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at import, those within `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from top_level([*node.body, *node.orelse])
        else:
            yield node


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            names.add((node.module or "").partition(".")[0])
    return names


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def run_fresh(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


# ------------------------------------------------------------------------------------------------------ imports


@MODULE
def test_a_package_imports_only_what_it_may_know(path: Path) -> None:
    """`eventbus` knows nobody, `sinks` and `trainer` know `eventbus`; the events are what they share.

    The demo is an application of all three, and nothing in `trainer` but its command line knows it.
    """
    package, *inner = path.relative_to(ROOT).parts
    assert not imported(path) & FORBIDDEN[package] or inner[0] == "demo"


def test_only_the_command_line_knows_the_demo() -> None:
    """Training needs neither sinks nor scikit-learn."""
    text = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    assert [name for name, source in text.items() if "trainer.demo" in source and "/demo/" not in name] == [
        "trainer/__main__.py"
    ]


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("eventbus", {"aiofiles", "httpx", "numpy", "sinks", "torch", "trainer", "trio", "uvloop"}),
        ("sinks", {"httpx", "numpy", "torch", "trainer", "trio", "uvloop"}),
    ],
)
def test_importing_eventbus_or_sinks_imports_nothing_heavy(package: str, absent: set[str]) -> None:
    """A service that only listens starts quickly, and without the extras."""
    loaded = run_fresh(f"import sys, {package}; print(*sorted({absent!r} & set(sys.modules)))")
    assert loaded == ""


@pytest.mark.parametrize("package", ["eventbus", "sinks"])
def test_every_module_of_eventbus_and_sinks_imports_on_its_own(package: str) -> None:
    """No module needs another to have been imported first, and none needs an extra."""
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in MODULES]
    modules = [".".join(parts).removesuffix(".__init__") for parts in paths if parts[0] == package]
    modules = [name for name in modules if name != "eventbus.trio_host"]  # imported only where trio runs
    code = f"""
import importlib, sys
for name in ("fastapi", "numpy", "torch", "tqdm", "trio", "uvloop"):
    sys.modules[name] = None
for module in {modules!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] in {PACKAGES!r}]:
        del sys.modules[name]
    importlib.import_module(module)
print("ok")
"""
    assert run_fresh(code) == "ok"


@pytest.mark.parametrize("package", ["eventbus", "sinks"])
def test_importing_starts_no_thread_and_takes_no_signal(package: str) -> None:
    """The library is a guest in the process."""
    code = f"""
import signal, sys, threading
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
interval = sys.getswitchinterval()
import {package}
assert threading.active_count() == 1
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert interval == sys.getswitchinterval()
"""
    run_fresh(code)


# -------------------------------------------------------------------------------------------------------- state


def may_keep_state(name: str, value: ast.expr | None, changed: set[str]) -> bool:
    """Say whether a module-level value could keep state: a new object, or a container that is no constant."""
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in MUTABLE_CLASSES or (called[:1].islower() and called not in STATELESS)
    if isinstance(value, ast.Dict | ast.DictComp | ast.List | ast.ListComp | ast.Set | ast.SetComp):
        return not name.isupper() or name in changed
    return False


def changed_names(path: Path) -> set[str]:
    """Return the names that a module rebinds as globals, or whose items it sets, deletes, adds or removes."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Global):
            names |= set(node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            names.add(ast.unparse(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            names.add(ast.unparse(node.func.value))
    return names


@MODULE
def test_a_module_keeps_no_state_of_its_own(path: Path) -> None:
    """Two buses in one process share nothing but what is listed in `STATE`."""
    changed = changed_names(path)
    found = {name for node in ast.walk(tree(path)) if isinstance(node, ast.Global) for name in node.names}
    found |= {f.name for f in functions(path) if any("cache" in ast.unparse(d) for d in f.decorator_list)}
    for statement in top_level(tree(path).body):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {ast.unparse(target) for target in targets} - {"__all__"}
            found |= {name for name in names if may_keep_state(name, statement.value, changed)}
    assert {(name_of(path), name) for name in found} <= STATE


# -------------------------------------------------------------------------------------------- what is exported


def in_order(names: Iterable[str]) -> list[str]:
    """Constants, then classes, then the rest, each by the alphabet: the order that ruff keeps."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_sorted_and_complete(package: str) -> None:
    """Every public name that the package imports or defines is in `__all__`, and nothing else is."""
    if package == "trainer":
        pytest.importorskip("torch")
    path = ROOT / package / "__init__.py"
    exported = importlib.import_module(package).__all__
    assert exported == in_order(exported)
    public: set[str] = set()
    for node in top_level(tree(path).body):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            if (node.module or "").partition(".")[0] in PACKAGES:
                public |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            public.add(node.name)
        elif isinstance(node, ast.Assign):
            public |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert set(exported) >= {name for name in public if not name.startswith("_")}
    assert all(hasattr(importlib.import_module(package), name) for name in exported)


@MODULE
def test_a_module_says_what_it_exports_in_order(path: Path) -> None:
    """Where a module has an `__all__`, it is sorted and its names exist in it."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
            assert exported == in_order(set(exported))


# ---------------------------------------------------------------------------------------------------- size, words


@MODULE
def test_a_module_has_a_docstring(path: Path) -> None:
    """Each file says which noun of the architecture it is."""
    assert ast.get_docstring(tree(path))


@MODULE
def test_files_and_functions_stay_short(path: Path) -> None:
    """What no longer fits is two things."""
    too_long = [
        f"{function.name}: {length} lines"
        for function in functions(path)
        if (length := (function.end_lineno or function.lineno) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES and name_of(path) not in TABLES:
        too_long.append(f"the file: {lines} lines")
    assert not too_long
