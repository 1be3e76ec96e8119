"""Callbacks: objects with a method per hook, and what turns one into a subscriber."""

# what each hook means is told once, in eventbus.events
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any

from eventbus.errors import SubscriptionError
from eventbus.events import EVENTS, Event
from eventbus.filters import unknown

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["Callback", "EventHook", "TrainerHook", "as_subscriber", "hooks_of"]


class Callback:
    """Something that takes part in a training: override the methods of the hooks it wants.

    A ``def`` method gets the live trainer, on the training thread; an ``async def`` method gets the event, on the
    loop of the bus. Of two callbacks the one with the higher `priority` comes first, else the one added first.
    Everything in `state_dict` is saved with a checkpoint and given back on resume; keep it to plain types.
    """

    priority: int = 0

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run needs; plain types and tensors only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of an earlier attempt."""

    # one line per hook of eventbus.EVENTS, in the order of a run; a test keeps them complete
    def on_pretrain_routine_start(self, trainer: Any, /) -> Any: ...
    def on_checkpoint_load(self, trainer: Any, /) -> Any: ...
    def on_pretrain_routine_end(self, trainer: Any, /) -> Any: ...
    def on_train_start(self, trainer: Any, /) -> Any: ...
    def on_train_epoch_start(self, trainer: Any, /) -> Any: ...
    def on_train_batch_start(self, trainer: Any, /) -> Any: ...
    def on_after_backward(self, trainer: Any, /) -> Any: ...
    def on_before_optimizer_step(self, trainer: Any, /) -> Any: ...
    def optimizer_step(self, trainer: Any, /) -> Any: ...
    def on_before_zero_grad(self, trainer: Any, /) -> Any: ...
    def on_train_batch_end(self, trainer: Any, /) -> Any: ...
    def on_log(self, trainer: Any, /) -> Any: ...
    def on_control(self, trainer: Any, /) -> Any: ...
    def on_lr_change(self, trainer: Any, /) -> Any: ...
    def on_train_epoch_end(self, trainer: Any, /) -> Any: ...
    def on_val_start(self, trainer: Any, /) -> Any: ...
    def on_val_batch_start(self, trainer: Any, /) -> Any: ...
    def on_val_image_end(self, trainer: Any, /) -> Any: ...
    def on_val_batch_end(self, trainer: Any, /) -> Any: ...
    def on_val_end(self, trainer: Any, /) -> Any: ...
    def on_fit_epoch_end(self, trainer: Any, /) -> Any: ...
    def on_model_save(self, trainer: Any, /) -> Any: ...
    def on_checkpoint_failed(self, trainer: Any, /) -> Any: ...
    def on_params_update(self, trainer: Any, /) -> Any: ...
    def on_exception(self, trainer: Any, /) -> Any: ...
    def on_train_end(self, trainer: Any, /) -> Any: ...
    def teardown(self, trainer: Any, /) -> Any: ...
    def on_predict_start(self, trainer: Any, /) -> Any: ...
    def on_predict_batch_start(self, trainer: Any, /) -> Any: ...
    def on_predict_postprocess_end(self, trainer: Any, /) -> Any: ...
    def on_predict_batch_end(self, trainer: Any, /) -> Any: ...
    def on_predict_end(self, trainer: Any, /) -> Any: ...
    def on_export_start(self, trainer: Any, /) -> Any: ...
    def on_export_end(self, trainer: Any, /) -> Any: ...
    def on_subscriber_error(self, trainer: Any, /) -> Any: ...
    def on_subscriber_disabled(self, trainer: Any, /) -> Any: ...
    def on_events_dropped(self, trainer: Any, /) -> Any: ...


def hooks_of(callback: object) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Each hook that a callback has a method of its own for; raises `UnknownHookError` for an ``on_…`` that is none."""
    for name in dir(type(callback)):
        if name in EVENTS:
            if getattr(type(callback), name) is not getattr(Callback, name, None):
                yield name, getattr(callback, name)
        elif name.startswith("on_"):
            raise unknown(name)


class TrainerHook:
    """Calls ``fn(trainer)`` inline, for the events of a trainer, as long as that trainer is doing something.

    Another trainer on the same bus may have the same run; its events are not for this one's callbacks.
    """

    def __init__(self, trainer: Trainer, fn: Callable[[Any], Any]) -> None:
        self._trainer = trainer
        self._fn = fn
        self.__qualname__ = _name(fn)

    def __call__(self, event: Event) -> None:
        if self._trainer.is_busy:
            self._fn(self._trainer)


class EventHook:
    """Awaits ``fn(event)`` on the loop of the bus; one object per registration, so that two trainers may share `fn`."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn
        self.__qualname__ = _name(fn)

    async def __call__(self, event: Event) -> None:
        await self._fn(event)


def as_subscriber(trainer: Trainer, fn: Callable[[Any], Any], hook: str) -> TrainerHook | EventHook:
    """What the bus calls: with the event for an ``async def``, else with the trainer.

    Raises `SubscriptionError` for a function that cannot take one argument.
    """
    try:
        signature(fn).bind(trainer)
    except TypeError:
        problem = f"cannot be called with one argument, as {hook!r} does"
        raise SubscriptionError(_name(fn), problem, "Write it as fn(trainer), or async def fn(event).") from None
    except ValueError:  # a builtin, which has no signature
        pass
    is_async = iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    return EventHook(fn) if is_async else TrainerHook(trainer, fn)


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
