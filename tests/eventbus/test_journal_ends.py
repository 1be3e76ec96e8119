"""G17 with forks, copies, exits, GPUs and secrets: who may write to a journal, and what gets into it."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from eventbus import Event, EventBus, JournalError, Log, TrainBatchEnd, read_journal
from tests.eventbus import fake_torch, scripts
from tests.eventbus.samples import Load, Tick
from tests.eventbus.waiting import until

got: list[Event] = []


def keep(event: Event) -> None:
    got.append(event)


def keep_too(event: Event) -> None:
    got.append(event)


@pytest.fixture(autouse=True)
def nothing_got() -> None:
    got.clear()


def journal_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainbus-journal"]


# --------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("travel", [lambda bus: pickle.loads(pickle.dumps(bus)), copy.deepcopy])
def test_G11_a_copy_of_a_bus_leaves_the_journal_to_the_original_and_starts_after_it(
    tmp_path: Path, travel: Any
) -> None:
    bus = EventBus(journal=tmp_path, run="r")
    bus.subscribe(keep, Tick, run_in="thread", durable=True, name="tracker")
    bus.subscribe(keep_too, Load, run_in="thread", overflow="spill", name="spiller")
    bus.publish(Tick(n=0))
    twin = travel(bus)
    assert [info.name for info in twin.describe()] == ["tracker", "spiller"]
    twin.publish(Tick(n=-1))  # it is stopped
    with pytest.raises(JournalError, match="is in use by process"):
        twin.__enter__()
    bus.publish(Tick(n=1))
    assert bus.flush()
    bus.close()
    assert [event.n for event in got] == [0, 1]  # type: ignore[attr-defined]
    with twin:
        twin.publish(Tick(n=2))
        twin.publish(Load(n=3))
        assert twin.flush()
    assert sorted(event.n for event in got) == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert len({event.seq for event in got}) == 4
    assert [event.n for event in read_journal(tmp_path)][-2:] == [2, 3]  # type: ignore[attr-defined]


def test_G11_off_on_a_copy_leaves_the_bookmark_of_the_original(tmp_path: Path) -> None:
    bus = EventBus(journal=tmp_path, autostart=False)
    bus.subscribe(keep, Tick, run_in="thread", durable=True, name="tracker")
    bus.publish(Tick(n=0))
    copy.deepcopy(bus).off("tracker")
    bus.close()
    with EventBus(journal=tmp_path) as again:
        again.subscribe(keep, Tick, run_in="thread", durable=True, name="tracker")
        assert again.flush()
    assert [event.n for event in got] == [0]  # type: ignore[attr-defined]


def test_G17_a_bus_that_is_collected_gives_the_directory_back(tmp_path: Path) -> None:
    """Without a close, without a warning, and without a thread that stays."""
    before = len(journal_threads())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bus = EventBus(journal=tmp_path, autostart=False)
        bus.subscribe(keep, Tick, run_in="thread", overflow="spill")
        bus.publish(Tick(n=1))
        del bus
        gc.collect()
        again = EventBus(journal=tmp_path)
        again.close()
        del again
        gc.collect()
    until(lambda: len(journal_threads()) <= before)
    assert [event.n for event in read_journal(tmp_path)] == [1]  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------- forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_G11_a_forked_child_writes_nothing_and_holds_nothing(tmp_path: Path) -> None:
    """The parent's journal is as it was; when the parent is killed, the next process gets it while the child lives."""
    done = scripts.run(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        directory = sys.argv[1]
        (out, into), (told, done) = os.pipe(), os.pipe()
        parent = os.fork()
        if not parent:
            bus = EventBus(journal=directory)
            for step in range(10):
                bus.publish(Log(step=step))
            child = os.fork()
            if not child:
                for step in range(100, 200):
                    bus.publish(Log(step=step))
                bus.flush(); bus.close()
                os.write(into, b"c")
                time.sleep(60)
                os._exit(0)
            os.read(out, 1)  # the child is done
            for step in range(10, 20):
                bus.publish(Log(step=step))
            os.write(done, f"{child}".encode())
            time.sleep(60)
        child = int(os.read(told, 100))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        bus = EventBus(journal=directory)
        bus.publish(Log(step=20))
        bus.close()
        say([event.step for event in read_journal(directory)] == list(range(21)))
        os.kill(child, signal.SIGKILL)
        """,
        str(tmp_path),
    )
    assert done.out[0] == "True", done


# ---------------------------------------------------------------------------------------------------------- exits


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "bus.close(); bus.close()"])
@pytest.mark.parametrize("subscribed", [True, False])
def test_G10_a_script_that_ends_leaves_a_whole_journal(tmp_path: Path, end: str, subscribed: bool) -> None:
    done = scripts.run(
        f"""
        bus = EventBus(journal=sys.argv[1])
        if {subscribed}:
            @bus.on("on_log", durable=True, name="d")
            async def d(event):
                await asyncio.sleep(0.001)
                say("seen", event.step)
        for step in range(20):
            bus.publish(Log(step=step))
        {end}
        """,
        str(tmp_path),
    )
    assert done.code == {"sys.exit(3)": 3, "raise ValueError": 1}.get(end, 0), done
    assert "Warning" not in done.err
    assert "Exception ignored" not in done.err
    assert done.out == [f"seen {step}" for step in range(20) if subscribed]
    assert [event.step for event in read_journal(tmp_path)] == list(range(20))  # type: ignore[attr-defined]
    assert all(path.stat().st_size < 100_000 for path in tmp_path.glob("*.events"))  # what was reserved is given back
    if subscribed:
        with EventBus(journal=tmp_path) as bus:
            bus.subscribe(keep, Log, run_in="thread", durable=True, name="d")
            assert bus.flush()
        assert not got


# ------------------------------------------------------------------------------------------------------------ GPU


def test_G9_numbers_on_a_gpu_are_written_without_a_wait_and_completed_when_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, they are NaN. Each event is read once and in its place, though numbers come segments later."""
    fake_torch.install(monkeypatch)
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 1024)
    device = fake_torch.Device()
    bus = EventBus(journal=tmp_path / "j", autostart=False)
    bus.subscribe(keep, TrainBatchEnd, run_in="thread", overflow="spill", maxsize=1, name="s")
    for n in range(20):
        loss: Any = fake_torch.Tensor(float(n), device) if n % 2 else float(n)
        bus.publish(TrainBatchEnd(epoch=0, batch=n, global_batch=n, step=n, metrics={"loss": loss}, lr=(0.1,)))
    shutil.copytree(tmp_path / "j", tmp_path / "killed")
    assert device.waits == 0
    device.run()
    bus.stats()
    shutil.copytree(tmp_path / "j", tmp_path / "later")
    with bus:
        assert bus.flush()

    def losses(directory: Path) -> list[float]:
        return [event.metrics["loss"] for event in read_journal(directory)]  # type: ignore[attr-defined]

    killed = losses(tmp_path / "killed")
    assert [math.isnan(loss) for loss in killed] == [bool(n % 2) for n in range(20)]
    assert killed[::2] == [float(n) for n in range(0, 20, 2)]
    for left in ("later", "j"):
        numbers = [event.seq for event in read_journal(tmp_path / left)]
        assert numbers == sorted(set(numbers))
        for after in (0, *numbers):
            assert [event.seq for event in read_journal(tmp_path / left, after=after)] == [
                number for number in numbers if number > after
            ]
        EventBus(journal=tmp_path / left).close()  # mended, and read again
        assert losses(tmp_path / left) == [float(n) for n in range(20)]
    assert [event.metrics["loss"] for event in got] == [float(n) for n in range(20)]  # type: ignore[attr-defined]
    assert device.waits == 0


def test_G9_an_inline_hook_beside_a_journal_waits_only_for_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch.install(monkeypatch)
    device = fake_torch.Device()
    bus = EventBus(journal=tmp_path, autostart=False)
    read: list[float] = []
    bus.subscribe(lambda event: read.append(event.values["a"]), Log)
    bus.publish(Log(step=1, values={"a": fake_torch.Tensor(1.0, device), "b": fake_torch.Tensor(2.0, device)}))
    assert read == [1.0]
    assert device.waits == 1
    bus.close()


# -------------------------------------------------------------------------------------------------------- privacy


class Contact(Event):
    """One whose own fields are secret."""

    password: str = ""
    api_key: Any = None
    address: str = ""
    notes: Any = None


def test_G16_no_secret_reaches_any_byte_of_the_directory(tmp_path: Path) -> None:
    """Wherever it stands: in a field, in a container, in a URL; served or not, spilled or not."""
    secret = "s3cr3t"
    bus = EventBus(journal=tmp_path, redact=["token", "secret", "passw", "api_key", "credential", "mine"])
    bus.subscribe(keep, Contact, Log, run_in="thread", overflow="spill", maxsize=1, name="spiller")
    for _ in range(3):
        bus.publish(
            Contact(
                password=secret, api_key={"deep": secret}, address=f"https://user:{secret}@host/x?sig={secret}",
                notes=[{"my_token": secret, "fine": [f"ftp://u:{secret}@h/y"]}, {"mine": secret}],
            )
        )  # fmt: skip
        bus.publish(Log(step=1, values={"secret": secret, "nested": {"credential": [secret]}, "loss": 0.5}))
        bus.publish(Load(value={"token": secret, "url": f"https://h/?token={secret}"}))
    assert bus.flush()
    bus.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    assert len(got) == 6
    assert secret not in repr(got)


@pytest.mark.skipif(sys.platform == "win32", reason="rights of another kind")
def test_G16_a_name_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    with EventBus(journal=tmp_path / "j") as bus:
        bus.subscribe(keep, Tick, run_in="thread", durable=True, name="../../escape/é %2e")
        bus.publish(Tick(n=1))
        assert bus.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
    (bookmark,) = (tmp_path / "j" / "subscribers").iterdir()
    assert bookmark.parent == tmp_path / "j" / "subscribers"
