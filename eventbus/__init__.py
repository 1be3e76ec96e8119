"""An asynchronous event bus for training: typed hook events, awaitable subscribers, and a GPU step that never waits."""

from typing import TYPE_CHECKING, Any

from eventbus.bus import EventBus
from eventbus.codec import decode, encode
from eventbus.errors import (
    AlreadyStartedError,
    ChildError,
    DecodeError,
    EventBusError,
    HookTakenError,
    JournalError,
    NameTakenError,
    NotPicklableError,
    PublishRecursionError,
    ReplayError,
    SinkGone,
    SinkUnavailable,
    SubscriptionError,
    UnknownHookError,
    WouldBlockError,
)
from eventbus.events import (
    EVENTS,
    AfterBackward,
    BeforeOptimizerStep,
    BeforeZeroGrad,
    CheckpointFailed,
    CheckpointLoad,
    ControlApplied,
    Event,
    EventsDropped,
    ExceptionRaised,
    ExportEnd,
    ExportStart,
    FitEpochEnd,
    Log,
    LRChange,
    ModelSave,
    OptimizerStep,
    ParamsUpdate,
    PredictBatchEnd,
    PredictBatchStart,
    PredictEnd,
    PredictPostprocessEnd,
    PredictStart,
    PretrainRoutineEnd,
    PretrainRoutineStart,
    SubscriberDisabled,
    SubscriberErrorEvent,
    Teardown,
    TrainBatchEnd,
    TrainBatchStart,
    TrainEnd,
    TrainEpochEnd,
    TrainEpochStart,
    TrainStart,
    UnknownEvent,
    ValBatchEnd,
    ValBatchStart,
    ValEnd,
    ValImageEnd,
    ValStart,
)
from eventbus.frozen import FrozenDict
from eventbus.handling import current_event
from eventbus.registry import Attachment, SubscriberInfo
from eventbus.runner import CloseReport
from eventbus.sink import Batch, Sink, encoded
from eventbus.stats import SubscriberStats
from eventbus.stream import Stream
from eventbus.subscription import Subscription

if TYPE_CHECKING:
    from eventbus.control import Control, Request
    from eventbus.health import SubscriberHealth
    from eventbus.recording import read_journal
    from eventbus.tracking import track

_LATER = {
    "Control": "eventbus.control",
    "Request": "eventbus.request",
    "SubscriberHealth": "eventbus.health",
    "read_journal": "eventbus.recording",
    "track": "eventbus.tracking",
}

__all__ = [
    "EVENTS",
    "AfterBackward",
    "AlreadyStartedError",
    "Attachment",
    "Batch",
    "BeforeOptimizerStep",
    "BeforeZeroGrad",
    "CheckpointFailed",
    "CheckpointLoad",
    "ChildError",
    "CloseReport",
    "Control",
    "ControlApplied",
    "DecodeError",
    "Event",
    "EventBus",
    "EventBusError",
    "EventsDropped",
    "ExceptionRaised",
    "ExportEnd",
    "ExportStart",
    "FitEpochEnd",
    "FrozenDict",
    "HookTakenError",
    "JournalError",
    "LRChange",
    "Log",
    "ModelSave",
    "NameTakenError",
    "NotPicklableError",
    "OptimizerStep",
    "ParamsUpdate",
    "PredictBatchEnd",
    "PredictBatchStart",
    "PredictEnd",
    "PredictPostprocessEnd",
    "PredictStart",
    "PretrainRoutineEnd",
    "PretrainRoutineStart",
    "PublishRecursionError",
    "ReplayError",
    "Request",
    "Sink",
    "SinkGone",
    "SinkUnavailable",
    "Stream",
    "SubscriberDisabled",
    "SubscriberErrorEvent",
    "SubscriberHealth",
    "SubscriberInfo",
    "SubscriberStats",
    "Subscription",
    "SubscriptionError",
    "Teardown",
    "TrainBatchEnd",
    "TrainBatchStart",
    "TrainEnd",
    "TrainEpochEnd",
    "TrainEpochStart",
    "TrainStart",
    "UnknownEvent",
    "UnknownHookError",
    "ValBatchEnd",
    "ValBatchStart",
    "ValEnd",
    "ValImageEnd",
    "ValStart",
    "WouldBlockError",
    "current_event",
    "decode",
    "encode",
    "encoded",
    "read_journal",
    "track",
]


def __getattr__(name: str) -> Any:
    """Import what only a training needs when it is asked for: a process that listens starts faster without it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
