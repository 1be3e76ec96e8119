"""Registering callbacks with a trainer: functions by hook, and objects with a method per hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from eventbus.events import EVENTS, Event
from trainer.callback import as_subscriber, hooks_of
from trainer.checkpoint import ModelCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus.bus import EventBus
    from eventbus.subscription import Subscription
    from trainer.callback import Callback
    from trainer.trainer import Trainer

__all__ = ["Callbacks"]


@dataclass(frozen=True)
class _Registered:
    hook: str
    fn: Callable[[Any], Any]
    priority: int
    #: What `disable_callback` may call it.
    names: frozenset[str]
    subscription: Subscription


class Callbacks:
    """The callbacks of a trainer; they and the inline hooks of its bus share one order: priority, then registration."""

    bus: EventBus
    run: str
    save_dir: Path | None
    #: Every callback object, in the order in which they were given.
    callback_objects: list[Callback]
    #: Those of them that write checkpoints.
    checkpoints: list[ModelCheckpoint]

    def _set_up_callbacks(self, callbacks: Iterable[Callback], on_error: Literal["isolate", "raise"]) -> None:
        self._on_callback_error = on_error
        self._registered: list[_Registered] = []
        self.callback_objects = list({id(one): one for one in callbacks}.values())  # one given twice is called once
        if self.save_dir is not None and not any(isinstance(one, ModelCheckpoint) for one in self.callback_objects):
            self.callback_objects.append(ModelCheckpoint())
        self.checkpoints = [one for one in self.callback_objects if isinstance(one, ModelCheckpoint)]
        for checkpoint in self.checkpoints:
            checkpoint.directory_in(self.save_dir)
        for callback in self.callback_objects:
            for hook, method in hooks_of(callback):
                self._register(hook, method, getattr(callback, "priority", 0), owner=type(callback).__name__)

    def add_callback(self, hook: str | type[Event], fn: Callable[[Any], Any], priority: int = 0) -> Subscription:
        """Call ``fn(trainer)`` at a hook, or await ``fn(event)`` when it is an ``async def``.

        Closing what it returns ends that. Higher `priority` comes first. The same function added again to the same
        hook is still called once. Raises `UnknownHookError` for a hook that no event has.
        """
        name = hook if isinstance(hook, str) else hook.hook
        for one in self._registered:
            if one.hook == name and one.fn == fn and not one.subscription.is_closed:
                return one.subscription
        return self._register(name, fn, priority)

    def _register(self, hook: str, fn: Callable[[Any], Any], priority: int, owner: str = "") -> Subscription:
        subscriber = as_subscriber(cast("Trainer", self), fn, hook)
        subscription = self.bus.subscribe(
            subscriber, hook, run=self.run, priority=priority, on_error=self._on_callback_error
        )
        qualname = subscriber.__qualname__
        names = frozenset({qualname, qualname.rpartition(".")[2], owner or qualname, subscription.name})
        self._registered.append(_Registered(hook, fn, priority, names, subscription))
        return subscription

    def disable_callback(self, name: str) -> None:
        """End the callbacks with this name: of a function, or of a callback's class. Raises `ValueError` for none."""
        found = [one for one in self._registered if name in one.names]
        if not found:
            known = sorted({one.subscription.name for one in self._registered})
            raise ValueError(f"There is no callback {name!r}; there are: {', '.join(known) or 'none'}.")
        for one in found:
            one.subscription.close()

    @property
    def callbacks(self) -> dict[str, tuple[Callable[[Any], Any], ...]]:
        """The callbacks of each hook, in the order in which they are called; use `add_callback` to add one."""
        open_ones = [one for one in self._registered if not one.subscription.is_closed]
        open_ones.sort(key=lambda one: -one.priority)
        return {hook: tuple(one.fn for one in open_ones if one.hook == hook) for hook in EVENTS}
