"""A subscriber that watches the loss from outside the training thread, and asks the run to slow down or stop.

Run it: ``python examples/early_warning.py``.
"""

import math

from eventbus import ControlApplied, Event, EventBus, TrainBatchEnd, TrainEnd, track

bus = EventBus()


class Diverging(Event):
    """An event of one's own: the loss is far above its average."""

    loss: float
    average: float


average: float | None = None


@bus.on(TrainBatchEnd)
async def watch(event: TrainBatchEnd) -> None:
    """Keep a moving average; publish when the loss leaves it, and stop at once when it is no number."""
    global average
    loss = event.metrics["loss"]
    if not math.isfinite(loss):
        bus.control.stop("the loss is not finite", requester="watch")
    elif average is not None and loss > 3 * average:
        bus.publish(Diverging(loss=loss, average=average))
    else:
        average = loss if average is None else 0.9 * average + 0.1 * loss


@bus.on("on_diverging")
async def warn(event: Diverging) -> None:
    """A real one would write to a chat room."""
    print(f"loss {event.loss:.1f} is far above its average of {event.average:.1f}")


@bus.on("on_control")
async def answered(event: ControlApplied) -> None:
    """The run says what it did with a request."""
    if not event.accepted:
        return  # asked again before the first request was answered
    print(f"{event.action}: {event.reason} (asked by {event.requester}, applied at step {event.step})")


@bus.on("on_train_end")
def ended(event: TrainEnd) -> None:
    """How it came out."""
    print(f"ended: {event.reason} after {event.step} steps")


def main() -> None:
    """A training whose loss explodes in its second epoch."""
    with bus, track(bus, epochs=3) as run:
        for epoch in run.epochs():
            for batch in run.batches(range(50)):
                exploded = epoch == 1 and batch > 20
                run.log(loss=(math.inf if batch > 30 else 50.0) if exploded else 1.0 + batch / 50)
                bus.flush()  # only so that this short script waits for its watcher


if __name__ == "__main__":
    main()
