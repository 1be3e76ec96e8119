"""How a model is computed: in which precision, compiled, with algorithms that give the same numbers each time."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trainer.toys import Recorder, batches, make_trainer, squared_error
from trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watching(Trainer):
    """Keeps the type of what the model computes, in each kind of step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kinds: dict[str, torch.dtype] = {}

    def look(self, step: str, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.model(batch[0])
        self.kinds[step] = output.dtype
        return output

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.look("training", batch).float() - batch[1]).pow(2).mean()

    def validation_step(self, batch: Any) -> torch.Tensor:
        return (self.look("validation", batch).float() - batch[1]).pow(2).mean()

    def prediction_step(self, batch: Any) -> torch.Tensor:
        return self.look("prediction", batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_step_computes_in_the_precision_asked_for(bus: EventBus, precision: Any) -> None:
    """The weights and their gradients stay as they are, and the hooks see nothing of it."""
    trainer = make_trainer(bus, kind=Watching, precision=precision)
    inside: list[bool] = []
    trainer.add_callback("on_after_backward", lambda t: inside.append(torch.is_autocast_enabled("cpu")))
    trainer.fit(batches(2), batches(1), epochs=1)
    list(trainer.predict(batches(1)))
    assert trainer.kinds == dict.fromkeys(("training", "validation", "prediction"), DTYPES[precision])
    assert trainer.model.weight.dtype == torch.float32
    assert inside == [False, False]
    assert trainer.args.precision == precision


def test_fp16_has_a_scaler_unless_one_is_given() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert make_trainer(None, precision="fp16").scaler.is_enabled()
    assert make_trainer(None, precision="fp16", scaler=given).scaler is given
    assert make_trainer(None, precision="bf16").scaler is None


def test_an_update_that_fp16_skips_is_no_step(bus: EventBus, tmp_path: Path) -> None:
    """Gradients too large for it: the batch is "skipped", the scale is halved, and the checkpoint has the scale."""

    def loss(model: Any, batch: Any) -> Any:
        small = 1e-3  # the first scale, 65536, is too large for the gradients else
        return squared_error(model, batch) * (math.inf if trainer.progress.global_batch == 1 else small)

    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=loss, precision="fp16", save_dir=tmp_path)
    assert trainer.fit(batches(3), epochs=1).step == 2
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "skipped", "ok"]
    assert torch.load(tmp_path / "last.pt", weights_only=True)["scaler"]["scale"] == 2.0**15
    small = lambda model, batch: squared_error(model, batch) * 1e-3  # noqa: E731
    resumed = make_trainer(bus, loss=small, precision="fp16", save_dir=tmp_path)
    resumed.fit(batches(3), epochs=2, resume="auto")
    assert (resumed.step, resumed.scaler.get_scale()) == (5, 2.0**15)


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match="precision='half' is not known; it is 'fp32', 'bf16' or 'fp16'"):
        make_trainer(None, precision="half")


def test_a_compiled_model_is_trained_and_saved_under_its_plain_names(
    bus: EventBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that takes no time. The checkpoint loads into the plain model, and the other way round."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    trainer = make_trainer(bus, compile=True, ema=0.5, save_dir=tmp_path)
    plain = make_trainer(None)
    trainer.fit(batches(2), batches(1), epochs=1, test_loader=batches(1))
    plain.fit(batches(2), batches(1), epochs=1)
    assert compiled
    assert torch.allclose(trainer.model.weight, plain.model.weight)
    assert sorted(torch.load(tmp_path / "last.pt", weights_only=True)["model"]) == ["bias", "weight"]
    resumed = make_trainer(bus, save_dir=tmp_path)
    assert resumed.fit(batches(2), batches(1), epochs=2, resume="auto").step == 4
    assert make_trainer(bus, compile=True, save_dir=tmp_path).fit(batches(2), epochs=3, resume="auto").step == 6


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_algorithms_are_for_the_fit_alone(bus: EventBus, fails: bool) -> None:
    cudnn = torch.backends.cudnn
    during: list[tuple[bool, ...]] = []

    def look(event: Any) -> None:
        during.append((torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark))
        if fails:
            raise ZeroDivisionError

    bus.subscribe(look, "on_train_batch_start", on_error="raise")
    cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trainer = make_trainer(bus, deterministic=True, seed=1)
        if fails:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(batches(1), epochs=1)
        else:
            trainer.fit(batches(1), epochs=1)
        assert during == [(True, True, False)]
        assert cudnn.benchmark
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
    make_trainer(None).fit(batches(1), epochs=1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_without_a_seed_says_so(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(None, deterministic=True).fit(batches(1), epochs=1)
    assert "deterministic=True without seed=" in caplog.text
