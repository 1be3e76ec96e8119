"""The vocabulary: every event of a training run, in the order in which a run publishes them.

This is the whole loop, each hook in its place (``Trainer.fit`` and ``track`` both follow it)::

    on_pretrain_routine_start                          # the configuration, before anything is built
        on_checkpoint_load                             # only when resuming
    on_pretrain_routine_end                            # model, optimizer and loaders exist
    on_train_start
    for epoch in range(start_epoch, epochs):
        on_train_epoch_start
        for batch in train_loader:
            on_train_batch_start
            loss.backward()
            on_after_backward                          # gradients of this batch exist
            every `accumulate` batches:
                on_before_optimizer_step               # gradients are final: unscaled and clipped
                optimizer.step()
                optimizer_step                         # parameters changed, `step` went up by one
                on_before_zero_grad                    # the last look at the gradients
                optimizer.zero_grad()
            on_train_batch_end
            on_log                                     # every `log_every` steps
            on_control                                 # a request was applied: stop, pause, set_lr, save
        scheduler.step()
        on_lr_change                                   # only when a learning rate changed
        on_train_epoch_end                             # before validation
        on_val_start                                   # phase "fit"
        for batch in val_loader:
            on_val_batch_start
            on_val_image_end                           # once per sample, only when somebody listens
            on_val_batch_end
        on_val_end
        on_fit_epoch_end                               # train and val together, once per epoch
        on_model_save | on_checkpoint_failed           # the file is on disk, or it could not be written
    on_exception                                       # only when the run failed or was interrupted
    on_train_end                                       # exactly once, whatever happened
    teardown                                           # exactly once, the last event of a run

Around the loop: ``on_params_update`` when weights change outside an optimizer step, ``on_predict_*`` and
``on_export_*`` from `Trainer.predict` and `Trainer.export`, and the bus about itself: ``on_subscriber_error``,
``on_subscriber_disabled``, ``on_events_dropped``.

Counting: `epoch` and `batch` are 0-based and `batch` restarts with each epoch; `global_batch` does not; `step`
counts optimizer updates that happened. People read ``epoch + 1 / epochs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventbus.event import EVENTS, Event, UnknownEvent

__all__ = [
    "EVENTS",
    "AfterBackward",
    "BeforeOptimizerStep",
    "BeforeZeroGrad",
    "CheckpointFailed",
    "CheckpointLoad",
    "ControlApplied",
    "Event",
    "EventsDropped",
    "ExceptionRaised",
    "ExportEnd",
    "ExportStart",
    "FitEpochEnd",
    "LRChange",
    "Log",
    "ModelSave",
    "OptimizerStep",
    "ParamsUpdate",
    "PredictBatchEnd",
    "PredictBatchStart",
    "PredictEnd",
    "PredictPostprocessEnd",
    "PredictStart",
    "PretrainRoutineEnd",
    "PretrainRoutineStart",
    "SubscriberDisabled",
    "SubscriberErrorEvent",
    "Teardown",
    "TrainBatchEnd",
    "TrainBatchStart",
    "TrainEnd",
    "TrainEpochEnd",
    "TrainEpochStart",
    "TrainStart",
    "UnknownEvent",
    "ValBatchEnd",
    "ValBatchStart",
    "ValEnd",
    "ValImageEnd",
    "ValStart",
]


# ---------------------------------------------------------------------------------------------------- the run


class PretrainRoutineStart(Event):
    """The run begins: no model on the device, no gradients, no files yet. `config` holds the settings."""

    config: Mapping[str, Any] = {}
    name: str | None = None
    host: str | None = None
    job: str | None = None


class PretrainRoutineEnd(Event):
    """Set-up is done: model, optimizer and loaders exist. `batches` is per epoch, None without a length."""

    epochs: int | None = None
    max_steps: int | None = None
    batches: int | None = None
    parameters: int | None = None
    device: str | None = None
    world_size: int = 1


class TrainStart(Event):
    """The epoch loop is about to begin; parameters are those of the start or of the loaded checkpoint."""

    epochs: int | None = None
    max_steps: int | None = None
    start_epoch: int = 0
    step: int = 0
    name: str | None = None
    host: str | None = None
    job: str | None = None


class TrainEpochStart(Event):
    """An epoch begins, or goes on after a resume. No gradients exist, but those of an open group of a resumed one."""

    epoch: int
    epochs: int | None = None
    step: int


class TrainBatchStart(Event, shed=True):
    """A batch was read from the loader, before the forward pass. Gradients only while accumulating."""

    epoch: int
    batch: int
    global_batch: int = 0
    step: int


class AfterBackward(Event, shed=True):
    """The backward pass is done: gradients of this batch exist (scaled, where a scaler is used)."""

    epoch: int
    batch: int
    global_batch: int = 0
    step: int


class BeforeOptimizerStep(Event, shed=True):
    """Gradients are final, unscaled and clipped; parameters have not changed yet."""

    epoch: int
    batch: int
    global_batch: int = 0
    step: int


class OptimizerStep(Event, shed=True, hook="optimizer_step"):
    """Parameters changed; gradients still exist. `step` already counts this update; `grad_norm` is before clipping."""

    epoch: int
    batch: int
    global_batch: int = 0
    step: int
    lr: tuple[float, ...] = ()
    grad_norm: float | None = None


class BeforeZeroGrad(Event, shed=True):
    """The last moment at which the gradients of this update can be read; parameters have changed."""

    epoch: int
    batch: int
    global_batch: int = 0
    step: int


class TrainBatchEnd(Event, shed=True):
    """A batch is done. `metrics` are this rank's, bare names (``loss``); `lr` has one value per parameter group.

    `status` is "ok", "skipped" (no update came of it, e.g. a non-finite gradient; its metrics are in no mean) or
    "retried" (it succeeded the second time). Gradients exist only while accumulating.
    """

    epoch: int
    batch: int
    global_batch: int = 0
    step: int
    metrics: Mapping[str, float] = {}
    lr: tuple[float, ...] = ()
    batch_size: int | None = None
    status: str = "ok"


class Log(Event, shed=True):
    """Averages since the last one, every `log_every` steps (``train/loss``), and whatever a user logs."""

    epoch: int | None = None
    step: int
    values: Mapping[str, Any] = {}


class TrainEpochEnd(Event):
    """The training part of an epoch is over, before validation. `metrics`: sample-weighted means (``train/loss``)."""

    epoch: int
    epochs: int | None = None
    step: int
    metrics: Mapping[str, float] = {}
    lr: tuple[float, ...] = ()
    seconds: float | None = None


# ----------------------------------------------------------------------------------------------- validation


class ValStart(Event):
    """Validation begins: no gradients are built. `epoch` is None when it stands alone.

    `phase` is "fit", "sanity", "final", "test" or "standalone".
    """

    epoch: int | None = None
    step: int = 0
    phase: str = "fit"
    metrics: Mapping[str, float] = {}


class ValBatchStart(Event, shed=True):
    """A validation batch was read, before its forward pass. No gradients."""

    epoch: int | None = None
    batch: int = 0
    phase: str = "fit"
    metrics: Mapping[str, float] = {}


class ValImageEnd(Event, shed=True):
    """One sample of a validation batch is done; published only when somebody listens. No gradients."""

    epoch: int | None = None
    batch: int = 0
    phase: str = "fit"
    metrics: Mapping[str, float] = {}


class ValBatchEnd(Event, shed=True):
    """A validation batch is done; `metrics` are its own. No gradients."""

    epoch: int | None = None
    batch: int = 0
    phase: str = "fit"
    metrics: Mapping[str, float] = {}


class ValEnd(Event):
    """Validation is over; `metrics` are sample-weighted means over the whole loader, bare names (``loss``)."""

    epoch: int | None = None
    step: int = 0
    phase: str = "fit"
    metrics: Mapping[str, float] = {}


class FitEpochEnd(Event):
    """An epoch with its validation is over: once per epoch, never for a final evaluation.

    `metrics` are ``train/…`` and ``val/…``; `fitness` is higher-is-better; `partial` marks an epoch cut short.
    The checkpoint of this epoch is not on disk yet.
    """

    epoch: int
    epochs: int | None = None
    step: int = 0
    metrics: Mapping[str, float] = {}
    fitness: float | None = None
    best_fitness: float | None = None
    monitor: str | None = None
    lr: tuple[float, ...] = ()
    seconds: float | None = None
    partial: bool = False


# ---------------------------------------------------------------------------------------------- checkpoints


class ModelSave(Event):
    """A checkpoint is complete and on disk at `path`. `value` is the monitored metric itself, `bytes` the size."""

    path: str
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    is_best: bool = False
    fitness: float | None = None
    previous_best: float | None = None
    monitor: str | None = None
    value: float | None = None
    bytes: int | None = None


class CheckpointFailed(Event):
    """A checkpoint could not be written; the run goes on and the older file at `path`, if any, is whole."""

    path: str
    error: str = ""


class CheckpointLoad(Event):
    """A checkpoint was loaded: parameters, optimizer and counters changed. `epoch` is the one it goes on in."""

    path: str
    epoch: int | None = None
    step: int = 0


# -------------------------------------------------------------------------------------- changes along the way


class ParamsUpdate(Event):
    """Parameters changed outside an optimizer step: an EMA swap, loaded weights, a freeze."""

    epoch: int | None = None
    step: int = 0
    reason: str = ""


class LRChange(Event):
    """A learning rate changed, one value per parameter group. `reason`: "schedule", "control" or "callback"."""

    step: int = 0
    old: tuple[float, ...] = ()
    new: tuple[float, ...] = ()
    reason: str = "schedule"


class ExceptionRaised(Event, hook="on_exception"):
    """The run failed or was interrupted; the exception leaves `fit` after the terminal events. `traceback` is text."""

    phase: str = ""
    epoch: int | None = None
    step: int = 0
    type: str = ""
    message: str = ""
    traceback: str = ""


class TrainEnd(Event):
    """The run is over, exactly once. `reason`: "completed", "stopped", "interrupted" or "failed". Files are on disk.

    "interrupted": by a signal that `Trainer` or `track` was told to obey, by Ctrl-C, or by ``sys.exit``.
    """

    epoch: int | None = None
    step: int = 0
    metrics: Mapping[str, float] = {}
    best_fitness: float | None = None
    reason: str = "completed"
    seconds: float | None = None


class Teardown(Event, hook="teardown"):
    """The last event of a run, exactly once."""

    reason: str = "completed"


# -------------------------------------------------------------------------------------- prediction and export


class PredictStart(Event):
    """Prediction begins: no gradients are built."""

    batch: int | None = None
    batch_size: int | None = None
    seconds: float | None = None


class PredictBatchStart(Event, shed=True):
    """A batch to predict was read, before its forward pass."""

    batch: int = 0
    batch_size: int | None = None
    seconds: float | None = None


class PredictPostprocessEnd(Event, shed=True):
    """The outputs of a predicted batch are ready."""

    batch: int = 0
    batch_size: int | None = None
    seconds: float | None = None


class PredictBatchEnd(Event, shed=True):
    """The outputs of a predicted batch are final; the caller gets them next."""

    batch: int = 0
    batch_size: int | None = None
    seconds: float | None = None


class PredictEnd(Event):
    """Prediction is over, also when the caller stopped reading early. `batch` counts the batches done."""

    batch: int | None = None
    batch_size: int | None = None
    seconds: float | None = None


class ExportStart(Event):
    """An export begins; nothing is on disk yet."""

    format: str = ""
    path: str | None = None
    bytes: int | None = None
    seconds: float | None = None


class ExportEnd(Event):
    """An exported model is on disk at `path`; `bytes` is its size."""

    format: str = ""
    path: str | None = None
    bytes: int | None = None
    seconds: float | None = None


# ---------------------------------------------------------------------------------------- the bus about itself


class ControlApplied(Event, hook="on_control"):
    """A control request was answered at a safe point of the run."""

    request_id: str = ""
    action: str = ""
    requester: str | None = None
    reason: str = ""
    accepted: bool = True
    step: int = 0
    detail: str = ""


class SubscriberErrorEvent(Event, shed=True, hook="on_subscriber_error"):
    """A subscriber failed `count` times since the last such event; told to the others, never to itself."""

    subscriber: str = ""
    failed_hook: str = ""
    reason: str = ""
    count: int = 1


class SubscriberDisabled(Event, shed=True):
    """A subscriber is switched off; told to the others."""

    subscriber: str = ""
    failed_hook: str = ""
    reason: str = ""
    count: int = 1


class EventsDropped(Event, shed=True):
    """`count` events of a subscriber were dropped since the last such event; told to the others."""

    subscriber: str = ""
    failed_hook: str = ""
    reason: str = ""
    count: int = 1


#: The last events of a run, which must reach everybody: none of them is kept from a subscriber that could still get it.
TERMINAL = (ExceptionRaised, TrainEnd, Teardown)
