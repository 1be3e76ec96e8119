"""What a trainer does with the requests that only it can fulfil."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from eventbus import EventBus, encode
from tests.trainer.toys import Recorder, batches, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

    from trainer import Trainer


def asking(trainer: Trainer, ask: Any, *, at: int = 0) -> None:
    """Ask once, from an inline hook in batch `at`."""
    trainer.add_callback("on_after_backward", lambda t: ask(t.bus.control) if t.progress.global_batch == at else None)


def test_save_writes_a_checkpoint_between_two_batches(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, save_dir=tmp_path)
    asking(trainer, lambda control: control.save("now"), at=1)
    trainer.fit(batches(4), epochs=1)
    hooks = seen.hooks
    control = hooks.index("on_control")
    assert hooks[control - 2 : control] == ["on_train_batch_end", "on_model_save"]
    assert (seen.one("on_control").accepted, seen.one("on_control").detail) == (True, str(tmp_path / "last.pt"))
    assert seen.of("on_model_save")[0].step == 2
    assert not seen.of("on_model_save")[0].is_best


@pytest.mark.parametrize("directory", [None, "file/runs"])
def test_save_that_cannot_be_done_is_answered_with_why(bus: EventBus, tmp_path: Path, directory: str | None) -> None:
    (tmp_path / "file").touch()
    seen = Recorder(bus)
    trainer = make_trainer(bus, save_dir=None if directory is None else tmp_path / directory)
    asking(trainer, lambda control: control.save())
    assert trainer.fit(batches(2), epochs=1).reason == "completed"
    answer = seen.one("on_control")
    assert not answer.accepted
    assert answer.detail.startswith("this run writes no checkpoints" if directory is None else "NotADirectoryError")


def test_a_rate_that_was_set_stays_in_the_plan_of_the_schedule(bus: EventBus) -> None:
    """Halved by hand in the first epoch, halved rates follow; the change is told once, as "control"."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4))
    plain = make_trainer(None, scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4))
    asking(trainer, lambda control: control.set_lr(scale=0.5))
    trainer.fit(batches(2), epochs=3)
    rates: list[float] = []
    plain.add_callback("on_fit_epoch_end", lambda t: rates.append(t.lr["lr/pg0"]))
    plain.fit(batches(2), epochs=3)
    assert [event.lr[0] for event in seen.of("on_fit_epoch_end")] == pytest.approx([rate / 2 for rate in rates])
    assert [event.reason for event in seen.of("on_lr_change")] == ["control", "schedule", "schedule", "schedule"]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("clip_norm", 0.5, True), ("clip_norm", None, True), ("clip_norm", -1, False),
        ("log_every", 1, True), ("epochs", 1, True), ("epochs", "many", False), ("save_every", 2, True),
        ("validate_every", 0, False), ("lr", 0.1, False),
    ],
)  # fmt: skip
def test_settings_that_can_be_changed(bus: EventBus, name: str, value: Any, accepted: bool) -> None:
    seen = Recorder(bus, "on_control")
    trainer = make_trainer(bus)
    asking(trainer, lambda control: control.set(name, value))
    trainer.fit(batches(1), epochs=2)
    assert seen.one("on_control").accepted is accepted
    if name == "lr":
        assert seen.one("on_control").detail == (
            "there is no setting 'lr'; it has: clip_norm, epochs, log_every, max_steps, save_every, validate_every"
        )


def test_a_request_is_awaited_by_the_subscriber_that_asked(bus: EventBus) -> None:
    """An async subscriber awaits the answer on the loop of the bus, while the training goes on."""
    answered: list[Any] = []

    @bus.on("on_train_start")
    async def ask(event: Any) -> None:
        answered.append(await bus.control.set("log_every", 7))

    trainer = make_trainer(bus)
    trainer.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", bool(answered)))
    trainer.fit(batches(2000), epochs=50)
    bus.flush()
    assert (answered[0].accepted, answered[0].detail) == (True, "log_every = 7")


@pytest.mark.asyncio
async def test_training_in_a_worker_thread_of_a_service() -> None:
    """The bus runs on the service's loop, the training in a thread; the service stops it and awaits the answer."""
    async with EventBus(run="service") as bus:
        started = bus.wait_for("on_train_batch_end", timeout=10)
        training = asyncio.create_task(asyncio.to_thread(lambda: make_trainer(bus).fit(batches(100), epochs=1000)))
        await started
        answer = await bus.control.stop("the service ends")
        result = await training
    assert answer.accepted
    assert (result.reason, result.stop_reason) == ("stopped", "the service ends")


@pytest.mark.asyncio
async def test_training_on_the_loop_of_the_service_itself_does_not_hang() -> None:
    """It holds the loop, so its end cannot wait for subscribers there; they get the events once the loop runs."""
    heard: list[str] = []
    async with EventBus(run="service") as bus:

        @bus.on("on_train_end")
        async def note(event: Any) -> None:
            heard.append(event.reason)

        make_trainer(bus).fit(batches(2), epochs=1)
        assert heard == []
        await bus.aflush()
        assert heard == ["completed"]


# --------------------------------------------------------------------------------------------- whoever asks, whatever


class Asker:
    """Asks for one thing after another, from one place; each `ask` gives the answer as a mapping."""

    def __init__(self, bus: EventBus) -> None:
        self.bus = bus
        self.control = bus.control
        self.threads: list[threading.Thread] = []

    def requests(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Everything that can be asked, ending with a stop."""
        return [
            ("set_lr", (0.03,)), ("save", ()), ("set", ("log_every", 7)), ("set", ("nonsense", 1)),
            ("pause", ()), ("resume", ()), ("stop", ()),
        ]  # fmt: skip

    def ask(self, action: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.control, action)(*arguments, reason=f"why {action}", requester=type(self).__name__)

    def begin(self) -> None:
        """Start to ask, once the run is there."""
        raise NotImplementedError

    def begin_in_a_thread(self, work: Any) -> None:
        """The same, in a thread of its own."""

        def start(event: Any) -> None:
            self.threads.append(threading.Thread(target=work))
            self.threads[0].start()

        self.bus.subscribe(start, "on_train_start")


class InlineHook(Asker):
    """One request a batch; it cannot wait for an answer, nor speak during a pause: so it asks for its end at once."""

    def begin(self) -> None:
        left = self.requests()

        def hook(event: Any) -> None:
            if left:
                action, arguments = left.pop(0)
                self.ask(action, arguments)
                if action == "pause":
                    self.ask(*left.pop(0))

        self.bus.subscribe(hook, "on_train_batch_end")


class AsyncSubscriber(Asker):
    def begin(self) -> None:
        async def ask_all(event: Any) -> None:
            for action, arguments in self.requests():
                await self.ask(action, arguments)

        self.bus.subscribe(ask_all, "on_train_start")


class ThreadSubscriber(Asker):
    def begin(self) -> None:
        def ask_all(event: Any) -> None:
            for action, arguments in self.requests():
                self.ask(action, arguments).result(10)

        self.bus.subscribe(ask_all, "on_train_start", run_in="thread")


class OtherThread(Asker):
    def begin(self) -> None:
        def ask_all() -> None:
            for action, arguments in self.requests():
                self.ask(action, arguments).result(10)

        self.begin_in_a_thread(ask_all)


class HTTPClient(Asker):
    """A service's loop in a thread of its own, asked over a socket; it answers with what came of the request."""

    def begin(self) -> None:
        self.begin_in_a_thread(lambda: asyncio.run(self._serve_and_ask()))

    async def _serve_and_ask(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            for action, arguments in self.requests():
                url = f"http://127.0.0.1:{port}/{action}"
                response = await asyncio.to_thread(httpx.post, url, json=arguments, timeout=10, trust_env=False)
                assert response.status_code == 200
                assert response.json()["action"] == action

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        arguments = json.loads(await reader.readexactly(size))
        answer = await self.ask(head.split()[1].strip("/"), tuple(arguments))
        body = encode(answer)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()


@pytest.mark.parametrize("kind", [InlineHook, AsyncSubscriber, ThreadSubscriber, OtherThread, HTTPClient])
def test_whoever_asks_is_answered_once_with_requester_and_reason(
    kind: type[Asker], bus: EventBus, tmp_path: Path
) -> None:
    """Everything that can be asked, from every place that may ask; applied between two batches, each told once."""
    seen = Recorder(bus, "on_control", "on_train_batch_*", "on_model_save")
    trainer = make_trainer(bus, save_dir=tmp_path)
    asker = kind(bus)
    asker.begin()
    result = trainer.fit(batches(100), epochs=1000)
    for thread in asker.threads:
        thread.join(10)
    assert (result.reason, result.stop_reason) == ("stopped", "why stop")
    told = seen.of("on_control")
    assert [event.action for event in told] == [action for action, _ in asker.requests()]
    assert len({event.request_id for event in told}) == len(told)
    assert {event.requester for event in told} == {kind.__name__}
    assert [event.reason for event in told] == [f"why {action}" for action, _ in asker.requests()]
    assert [event.accepted for event in told] == [True, True, True, False, True, True, True]
    assert (trainer.lr, trainer.progress.log_every) == ({"lr/pg0": 0.03}, 7)
    hooks = seen.hooks
    for place, hook in enumerate(hooks):
        if hook == "on_control":  # between two batches
            before = [other for other in hooks[:place] if other.startswith("on_train_batch")]
            assert before[-1:] in ([], ["on_train_batch_end"])


@pytest.mark.parametrize("action", ["set_lr", "save", "set", "stop"])
def test_a_request_during_validation_is_applied_before_its_next_batch(
    action: str, bus: EventBus, tmp_path: Path
) -> None:
    seen = Recorder(bus, "on_val_batch_*", "on_control", "on_val_end")
    trainer = make_trainer(bus, save_dir=tmp_path)
    arguments = {"set_lr": (0.5,), "set": ("log_every", 3)}.get(action, ())

    def ask(t: Trainer) -> None:
        if not seen.count("on_control") and seen.count("on_val_batch_end") == 1:
            getattr(t.bus.control, action)(*arguments)

    trainer.add_callback("on_val_batch_end", ask)
    result = trainer.fit(batches(2), batches(3), epochs=1)
    assert seen.hooks[:4] == ["on_val_batch_start", "on_val_batch_end", "on_control", "on_val_end"][
        : 3 + (action == "stop")
    ] + ([] if action == "stop" else ["on_val_batch_start"])
    assert seen.one("on_control").accepted
    assert result.reason == ("stopped" if action == "stop" else "completed")


def test_a_validation_is_held_by_a_pause(bus: EventBus) -> None:
    """Between two of its batches, until another thread resumes it."""
    seen = Recorder(bus, "on_val_batch_*", "on_control")

    @bus.on("on_control", run_in="thread")
    def go_on(event: Any) -> None:
        if event.action == "pause":
            bus.control.resume("enough", run=event.run).result(10)

    trainer = make_trainer(bus)
    trainer.add_callback(
        "on_val_batch_start", lambda t: bus.control.pause() if seen.count("on_val_batch_start") == 1 else 0
    )
    assert trainer.fit(batches(1), batches(2), epochs=1).reason == "completed"
    batch = ["on_val_batch_start", "on_val_batch_end"]
    assert seen.hooks == [*batch, "on_control", "on_control", *batch]


def test_requests_before_the_start_and_after_the_end_are_refused_at_once(bus: EventBus) -> None:
    """They do not wait for a run that may come, or one that is over: also from the hooks of its end."""
    late: list[Any] = []
    before = bus.control.stop("too early", run="test")
    trainer = make_trainer(bus)
    for hook in ("on_train_end", "teardown"):
        trainer.add_callback(hook, lambda t: late.append(t.bus.control.stop("too late")))
    assert trainer.fit(batches(2), epochs=1).reason == "completed"
    late.append(bus.control.stop("too late", run="test"))
    for request in (before, *late):
        answer = request.result(0)
        assert (answer.accepted, answer.detail) == (False, "run 'test' is not active, and no other is")


def test_H7_all_who_ask_for_a_stop_are_kept_and_the_first_reason_is_that_of_the_run(bus: EventBus) -> None:
    seen = Recorder(bus, "on_control")
    trainer = make_trainer(bus)
    trainer.add_callback("on_after_backward", lambda t: t.bus.control.stop("loss", requester="one"))
    trainer.add_callback("on_train_batch_end", lambda t: t.bus.control.stop("time", requester="other"))
    trainer.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", False))  # nobody takes a stop back
    result = trainer.fit(batches(5), epochs=1)
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "loss", 1)
    assert [(e.reason, e.requester, e.accepted) for e in seen.of("on_control")] == [
        ("loss", "one", True),
        ("time", "other", True),
    ]


def test_signals_in_a_worker_thread_are_refused_with_the_way_to_do_it(bus: EventBus) -> None:
    """The way it names works: a handler on the main thread asks, and the run ends as interrupted."""
    trainer = make_trainer(bus, signals=("SIGTERM", "SIGUSR1"))
    outcomes: list[Any] = []

    def train(**options: Any) -> None:
        try:
            outcomes.append(make_trainer(bus, **options).fit(batches(100), epochs=1000).reason)
        except RuntimeError as error:
            outcomes.append(str(error))

    def in_a_thread(**options: Any) -> None:
        thread = threading.Thread(target=train, kwargs=options)
        thread.start()
        thread.join(20)

    in_a_thread(signals=("SIGTERM", "SIGUSR1"))
    assert outcomes.pop() == (
        "signals=(SIGTERM, SIGUSR1) works only on the main thread, where Python handles signals. Run the training "
        "there, or have a handler there that asks: bus.control.stop('SIGTERM', requester='signal')."
    )
    assert trainer.progress.reason == ""
    before = signal.signal(signal.SIGUSR1, lambda *_: bus.control.stop("SIGUSR1", run="test", requester="signal"))
    bus.subscribe(lambda event: os.kill(os.getpid(), signal.SIGUSR1), "on_train_batch_end", once=True)
    try:
        in_a_thread()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outcomes == ["interrupted"]
