"""A run from its first event to its last: whatever happens in between, it gets exactly one terminal event."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from eventbus.events import (
    Event,
    ExceptionRaised,
    PretrainRoutineEnd,
    PretrainRoutineStart,
    Teardown,
    TrainEnd,
    TrainStart,
)
from eventbus.request import SIGNAL, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from eventbus.bus import EventBus
    from eventbus.control import Inbox

__all__ = ["Lifecycle", "Plan"]

_log = logging.getLogger("trainbus")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run sets out to do, and where it starts."""

    #: None = the bus's.
    run: str | None = None
    #: None = the bus's.
    rank: int | None = None
    attempt: int = 0
    #: None = no limit; the run ends with whichever of the two limits comes first.
    epochs: int | None = None
    max_steps: int | None = None
    start_epoch: int = 0
    step: int = 0
    #: Told in `on_pretrain_routine_start`.
    config: Mapping[str, Any] = field(default_factory=dict)


class Lifecycle:
    """A context manager around a run; `Progress` says what happens inside.

    On the way out by an exception the order is: an end for every open start, `on_exception`, answers to requests
    that wait, `on_train_end`, `teardown`. The exception goes on unchanged.
    """

    def __init__(self, bus: EventBus, plan: Plan) -> None:
        self.bus = bus
        self.run = plan.run if plan.run is not None else bus.run
        self.rank = plan.rank
        self.attempt = plan.attempt
        self.epochs = plan.epochs
        self.max_steps = plan.max_steps
        self.start_epoch = self.epoch = plan.start_epoch
        self.step = plan.step
        self.config = dict(plan.config)
        #: This epoch's, by qualified name; what a hook adds before `on_fit_epoch_end` is part of it.
        self.metrics: dict[str, float] = {}
        self.best_fitness: float | None = None
        #: Epochs begun, and those of them that were not cut short.
        self.begun_epochs = self.whole_epochs = 0
        self.is_stopped = False
        #: Whether the stop came from a signal, in whichever process of the run.
        self.is_interrupted = False
        self.stop_reason = ""
        #: The signal that came, here; empty without one.
        self.signalled = ""
        #: Why the run ended, as in `TrainEnd`; empty while it runs.
        self.reason = ""
        #: What the run is doing, for `on_exception`.
        self.phase = "setup"
        self.inbox: Inbox | None = None
        self._is_signal_passed_on = False
        self._began = monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process is not the run: nobody can ask it for anything."""
        return self.__dict__ | {"inbox": None}

    def publish(self, kind: type[Event], **fields: Any) -> None:
        """Publish an event of this run."""
        if self.bus._ignores(kind):  # as most events of a batch are
            return
        self.bus.publish(kind(run=self.run, rank=self.rank, attempt=self.attempt, **fields))

    def stop(self, reason: str = "") -> None:
        """Ask the run to end before its next batch; from any thread."""
        self.bus.control.stop(reason, run=self.run)

    def interrupt(self, why: str) -> None:
        """Ask the run to end as a signal does; from a handler, at any moment, before the run has begun included."""
        self.signalled = self.signalled or why
        self._pass_on_signal()

    def _pass_on_signal(self) -> None:
        if self.inbox is not None and self.signalled and not self._is_signal_passed_on:
            self._is_signal_passed_on = True
            self.inbox.post(Request(action="stop", run=self.run, reason=self.signalled, requester=SIGNAL))

    @property
    def should_stop(self) -> bool:
        """Whether anybody has asked the run to stop."""
        return self.is_stopped or bool(self.signalled) or (self.inbox is not None and self.inbox.has("stop"))

    def __enter__(self) -> Self:
        self.bus._check_takes_events()
        self._began = monotonic()
        self.inbox = self.bus.control.open(self.run)
        self._pass_on_signal()
        try:
            self.publish(PretrainRoutineStart, config=self.config, **_whereabouts(self.run))
        except BaseException as error:  # a raising hook; `__exit__` is not called then
            self._finish(error)
            raise
        return self

    def ready(
        self,
        *,
        batches: int | None = None,
        parameters: int | None = None,
        device: str | None = None,
        world_size: int = 1,
    ) -> None:
        """Say that set-up is done and that the epochs begin."""
        plan = {"epochs": self.epochs, "max_steps": self.max_steps}
        found = {"batches": batches, "parameters": parameters, "device": device, "world_size": world_size}
        self.publish(PretrainRoutineEnd, **found, **plan)
        self.phase = "train"
        self.publish(TrainStart, start_epoch=self.start_epoch, step=self.step, **plan, **_whereabouts(self.run))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error if error is not None else _caught(self.leave)
        struck = self._finish(failure)
        if error is None and (failure is not None or struck is not None):
            raise failure or struck  # type: ignore[misc]  # one of them is there

    def leave(self) -> None:
        """End what is open when the block is left without an error."""

    def owed(self) -> Sequence[Callable[[], None]]:
        """What ends each open start after an error, innermost first; none of it reads from a device."""
        return ()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return monotonic() - self._began

    @property
    def is_done(self) -> bool:
        """Whether the run did what was planned; a run without a plan has."""
        if self.epochs is None and self.max_steps is None:
            return True
        return self.reached_max_steps or (
            self.epochs is not None and self.start_epoch + self.whole_epochs >= self.epochs
        )

    @property
    def reached_max_steps(self) -> bool:
        """Whether as many optimizer updates were made as planned."""
        return self.max_steps is not None and self.step >= self.max_steps

    def _finish(self, error: BaseException | None) -> BaseException | None:
        """Publish what is owed and the terminal events, each in spite of what the others raise.

        Returns the first thing raised meanwhile that is no mere `Exception`, such as a second Ctrl-C.
        """
        self.reason = self._reason(error)
        steps = list(self.owed())
        if error is not None and self.reason in ("failed", "interrupted"):
            steps.append(lambda: self._tell(error))
        if self.inbox is not None:
            steps.append(self.inbox.close)
        steps += [self._tell_end, lambda: self.publish(Teardown, reason=self.reason)]
        raised = [caught for step in steps if (caught := _caught(step)) is not None]
        self.inbox = None
        for caught in raised:
            _log.error("Run %r: something failed while it was ending.", self.run, exc_info=caught)
        return next((caught for caught in raised if not isinstance(caught, Exception)), None)

    def _reason(self, error: BaseException | None) -> str:
        if isinstance(error, Exception):
            return "interrupted" if self.signalled else "failed"  # as a rule something else that the signal killed
        if error is not None and not isinstance(error, GeneratorExit):  # GeneratorExit: the consumer had enough
            return "interrupted"
        if not self.is_stopped and error is None and self.is_done:
            return "completed"
        return "interrupted" if self.is_interrupted or self.signalled else "stopped"

    def _tell(self, error: BaseException) -> None:
        self.publish(
            ExceptionRaised,
            phase=self.phase,
            epoch=self._last_epoch(),
            step=self.step,
            type=type(error).__qualname__,
            message=_text(error),
            traceback="".join(traceback.format_exception(error)),
        )

    def _tell_end(self) -> None:
        self.publish(
            TrainEnd,
            epoch=self._last_epoch(),
            step=self.step,
            metrics=self.metrics,
            best_fitness=self.best_fitness,
            reason=self.reason,
            seconds=self.seconds,
        )

    def _last_epoch(self) -> int | None:
        return self.epoch if self.begun_epochs else None


def _caught(step: Callable[[], None]) -> BaseException | None:
    try:
        step()
    except BaseException as error:  # noqa: BLE001  # told by whoever called, after the run has ended
        return error
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # a broken __str__ must not hide the failure itself
        return "<no message>"


def _whereabouts(run: str) -> dict[str, str | None]:
    return {"name": run, "host": socket.gethostname(), "job": os.environ.get("SLURM_JOB_ID")}
