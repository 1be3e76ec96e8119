"""Which events a subscription hears: hook names, ``*`` patterns and event classes, checked at registration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from eventbus.errors import UnknownHookError
from eventbus.events import EVENTS, Event

__all__ = ["Filter", "is_for_real"]

#: What other frameworks call our hooks, by framework. Where a name means two moments, ours is the nearest.
_ELSEWHERE = {
    "Keras": {
        "on_train_begin": "on_train_start",
        "on_epoch_begin": "on_train_epoch_start",
        "on_epoch_end": "on_fit_epoch_end",
        "on_train_batch_begin": "on_train_batch_start",
        "on_batch_begin": "on_train_batch_start",
        "on_batch_end": "on_train_batch_end",
        "on_test_begin": "on_val_start",
        "on_test_end": "on_val_end",
        "on_test_batch_begin": "on_val_batch_start",
        "on_test_batch_end": "on_val_batch_end",
        "on_predict_begin": "on_predict_start",
        "on_predict_batch_begin": "on_predict_batch_start",
    },
    "mmengine": {
        "before_run": "on_pretrain_routine_start",
        "after_run": "teardown",
        "before_train": "on_train_start",
        "after_train": "on_train_end",
        "before_train_epoch": "on_train_epoch_start",
        "after_train_epoch": "on_train_epoch_end",
        "before_train_iter": "on_train_batch_start",
        "after_train_iter": "on_train_batch_end",
        "before_val": "on_val_start",
        "after_val": "on_val_end",
        "before_val_epoch": "on_val_start",
        "after_val_epoch": "on_val_end",
        "before_val_iter": "on_val_batch_start",
        "after_val_iter": "on_val_batch_end",
        "before_save_checkpoint": "on_model_save",
        "after_load_checkpoint": "on_checkpoint_load",
    },
    "Lightning": {
        "setup": "on_pretrain_routine_start",
        "on_fit_start": "on_pretrain_routine_end",
        "on_fit_end": "teardown",
        "on_training_start": "on_train_start",
        "on_training_end": "on_train_end",
        "on_validation_start": "on_val_start",
        "on_validation_end": "on_val_end",
        "on_validation_epoch_start": "on_val_start",
        "on_validation_epoch_end": "on_val_end",
        "on_validation_batch_start": "on_val_batch_start",
        "on_validation_batch_end": "on_val_batch_end",
        "on_save_checkpoint": "on_model_save",
        "on_load_checkpoint": "on_checkpoint_load",
        "on_before_backward": "on_after_backward",
    },
    "Transformers": {
        "on_init_end": "on_pretrain_routine_end",
        "on_step_begin": "on_train_batch_start",
        "on_step_end": "on_train_batch_end",
        "on_substep_end": "on_train_batch_end",
        "on_pre_optimizer_step": "on_before_optimizer_step",
        "on_optimizer_step": "optimizer_step",
        "on_evaluate": "on_val_end",
        "on_save": "on_model_save",
        "on_predict": "on_predict_end",
    },
    "Ignite": {
        "STARTED": "on_train_start",
        "EPOCH_STARTED": "on_train_epoch_start",
        "EPOCH_COMPLETED": "on_train_epoch_end",
        "ITERATION_STARTED": "on_train_batch_start",
        "ITERATION_COMPLETED": "on_train_batch_end",
        "COMPLETED": "on_train_end",
        "EXCEPTION_RAISED": "on_exception",
        "TERMINATE": "on_train_end",
    },
    "Composer": {
        "fit_start": "on_train_start",
        "fit_end": "on_train_end",
        "epoch_start": "on_train_epoch_start",
        "epoch_end": "on_train_epoch_end",
        "batch_start": "on_train_batch_start",
        "batch_end": "on_train_batch_end",
        "eval_start": "on_val_start",
        "eval_end": "on_val_end",
    },
    "fastai": {
        "before_fit": "on_train_start",
        "before_epoch": "on_train_epoch_start",
        "before_batch": "on_train_batch_start",
        "after_backward": "on_after_backward",
        "before_step": "on_before_optimizer_step",
        "after_step": "optimizer_step",
        "after_batch": "on_train_batch_end",
        "before_validate": "on_val_start",
        "after_validate": "on_val_end",
        "after_epoch": "on_fit_epoch_end",
        "after_fit": "on_train_end",
    },
    "Another place": {"on_teardown": "teardown", "on_optimizer_step_end": "optimizer_step"},
}


class Filter:
    """A set of hooks: ``Filter("on_val_*", TrainEnd)``; no hook at all means every event.

    A name or pattern with a leading ``!`` leaves hooks out again. A class means itself and all below it. Patterns
    also match events that are defined later; a plain name must exist now.
    """

    __slots__ = ("_classes", "_left_out", "_patterns", "hooks", "names")

    def __init__(self, *hooks: str | type[Event]) -> None:
        for hook in hooks:
            _check(hook)
        self._classes = frozenset(h for h in hooks if isinstance(h, type) and h is not Event)
        names = {h for h in hooks if isinstance(h, str) and not h.startswith("!")}
        self._patterns = frozenset(names | {c.hook for c in self._classes})  # a class defined again has the same hook
        self._left_out = frozenset(h[1:] for h in hooks if isinstance(h, str) and h.startswith("!"))
        if Event in hooks or not (self._classes or self._patterns):
            self._patterns |= {"*"}
        #: What it was made of, and how people wrote it.
        self.hooks = hooks
        self.names: tuple[str, ...] = tuple(h if isinstance(h, str) else h.hook for h in hooks) or ("*",)

    def hears(self, cls: type[Event], hook: str) -> bool:
        if any(fnmatchcase(hook, pattern) for pattern in self._left_out):
            return False
        return issubclass(cls, tuple(self._classes)) or any(fnmatchcase(hook, pattern) for pattern in self._patterns)

    def __or__(self, other: Filter) -> Filter:
        """Hear what either hears (what one leaves out, the other may still hear)."""
        union = Filter.__new__(Filter)
        union._classes = self._classes | other._classes
        union._patterns = self._patterns | other._patterns
        union._left_out = self._left_out & other._left_out
        union.hooks = tuple(dict.fromkeys((self.hooks or ("*",)) + (other.hooks or ("*",))))
        union.names = tuple(dict.fromkeys(self.names + other.names))
        return union

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[frozenset[object], ...]:
        return self._classes, self._patterns, self._left_out

    def __repr__(self) -> str:
        return f"Filter({', '.join(map(repr, self.names))})"


def _check(hook: object) -> None:
    if isinstance(hook, type) and issubclass(hook, Event):
        return
    if not isinstance(hook, str):
        raise UnknownHookError(repr(hook), None, hint=_hint(hook))
    pattern = hook.removeprefix("!")
    if "*" in pattern:
        if not any(fnmatchcase(known, pattern) for known in EVENTS) and not pattern.startswith("on_"):
            raise UnknownHookError(hook, nearest(pattern))
    elif pattern not in EVENTS:
        raise unknown(hook)


def _hint(thing: object) -> str:
    """What to write instead of something that is no hook."""
    if isinstance(thing, Event):
        return f"Name the class, not an event of it: {type(thing).__qualname__}."
    if isinstance(thing, list | tuple | set | frozenset):
        return "Give several hooks one by one: on('on_log', 'on_train_end')."
    if callable(thing) and not isinstance(thing, type):
        return "A decorator needs its brackets: write @bus.on('on_log'), or @bus.on() for every event."
    return "A hook is a name, a pattern, or an event class."


def unknown(hook: str) -> UnknownHookError:
    """The error for a hook that no event has, with the nearest real name."""
    plain = hook.removeprefix("!")
    for framework, names in _ELSEWHERE.items():
        if plain in names:
            return UnknownHookError(hook, names[plain], framework)
    return UnknownHookError(hook, nearest(plain))


def nearest(name: str, among: Iterable[str] | None = None) -> str | None:
    """The most similar known name, or None when nothing comes close."""
    if among is None:
        name = name.replace("_begin", "_start").replace("_finish", "_end")
    found = difflib.get_close_matches(name, tuple(EVENTS if among is None else among), n=1, cutoff=0.5)
    return found[0] if found else None


def is_for_real(event: Event) -> bool:
    """Whether an event is none of the trial validation before a training (phase "sanity"), as sinks want by default."""
    return getattr(event, "phase", None) != "sanity" or not event.hook.startswith("on_val_")
