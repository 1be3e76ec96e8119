"""Exporting: every file computes what the model does, and a failed export leaves what was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.trainer.toys import Recorder, make_trainer
from trainer import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus
    from trainer import Trainer

#: torch deprecates TorchScript and its own quantisation, and works on them all the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    """With a layer that does something else while training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.fixture
def trainer(bus: EventBus) -> Trainer:
    return make_trainer(bus, model=network())


def expected(trainer: Trainer, x: torch.Tensor = X) -> torch.Tensor:
    (outputs,) = trainer.predict([x])
    return outputs


def from_weights(path: Path, x: torch.Tensor) -> torch.Tensor:
    model = network()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()(x)


def from_torchscript(path: Path, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.load(path)(x)


def from_pt2(path: Path, x: torch.Tensor) -> torch.Tensor:
    return torch.export.load(path).module()(x)


def from_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(str(path))
    (outputs,) = model.run(None, {model.input_names[0]: x.numpy()})
    return torch.from_numpy(outputs)


READ = {"weights": from_weights, "torchscript": from_torchscript, "pt2": from_pt2, "onnx": from_onnx}


def skip_unless_installed(format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnx")


@pytest.mark.parametrize("format", READ)
def test_the_file_computes_what_the_model_does(trainer: Trainer, tmp_path: Path, format: str) -> None:
    """In evaluation mode, whatever the mode of the model is; alone in its folder."""
    skip_unless_installed(format)
    path = trainer.export(format, tmp_path / "deep" / f"model.{format}", example=X)
    assert torch.allclose(READ[format](path, X), expected(trainer), atol=1e-6)
    assert trainer.model.training
    assert [file.name for file in path.parent.iterdir()] == [path.name]


ANY_SIZE = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2)},)}


@pytest.mark.parametrize(("format", "options"), [("torchscript", {"check_trace": False}), ("pt2", ANY_SIZE)])
def test_options_reach_torch(trainer: Trainer, tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    """Batches of any size, which torch.export only allows when it is told to."""
    path = trainer.export(format, tmp_path / "model", example=(X,), **options)
    more = torch.cat([X, -X])
    assert torch.allclose(READ[format](path, more), expected(trainer, more), atol=1e-6)


def test_onnx_for_any_size_with_its_weights_in_a_file_of_their_own(trainer: Trainer, tmp_path: Path) -> None:
    skip_unless_installed("onnx")
    path = trainer.export("onnx", tmp_path / "model.onnx", example=X, external_data=True, **ANY_SIZE)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    more = torch.cat([X, -X])
    assert torch.allclose(from_onnx(path, more), expected(trainer, more), atol=1e-6)


def test_several_arguments(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, model=nn.Bilinear(3, 3, 1))
    path = trainer.export("pt2", tmp_path / "model.pt2", example=(X, -X))
    assert torch.allclose(torch.export.load(path).module()(X, -X), trainer.model(X, -X))


def test_dynamic_quantisation(trainer: Trainer, tmp_path: Path) -> None:
    """Smaller weights, nearly the same outputs, and a model that is left as it is."""
    trainer.model[0].weight.data *= 3
    path = trainer.export("torchscript", tmp_path / "model.ts", example=X, quantize="dynamic")
    outputs, plain = from_torchscript(path, X), expected(trainer)
    assert torch.allclose(outputs, plain, atol=0.1)
    assert not torch.equal(outputs, plain)
    assert type(trainer.model[0]) is nn.Linear
    weights = torch.load(trainer.export("weights", tmp_path / "w.pt", quantize="dynamic"), weights_only=True)
    assert weights["0._packed_params._packed_params"][0].dtype == torch.qint8


def test_hooks_see_the_file(bus: EventBus, trainer: Trainer, tmp_path: Path) -> None:
    """A callback written for Ultralytics reads `exporter.file`; the events tell format, path, size and time."""
    files: list[Any] = []

    class Upload(Callback):
        def on_export_start(self, exporter: Any) -> None:
            files.append((exporter.file, exporter.file.exists()))

        def on_export_end(self, exporter: Any) -> None:
            files.append((exporter.file, exporter.file.exists()))

    trainer = make_trainer(bus, callbacks=[Upload()])
    seen = Recorder(bus, "on_export_*")
    path = trainer.export("weights", tmp_path / "w.pt")
    assert files == [(path, False), (path, True)]
    assert trainer.file is None
    start, end = seen.events
    assert (start.hook, start.format, start.path) == ("on_export_start", "weights", str(path))
    assert (end.hook, end.bytes, end.path) == ("on_export_end", path.stat().st_size, str(path))
    assert end.seconds >= 0


@pytest.mark.parametrize("format", ["weights", "torchscript", "pt2"])
def test_a_failed_export_leaves_what_was_there(
    bus: EventBus, trainer: Trainer, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception says what was exported; no half file, no `on_export_end`."""
    path = tmp_path / "model"
    trainer.export("weights", path)
    before, seen = path.read_bytes(), Recorder(bus, "on_export_*")
    trainer.export(format, path, example=X)
    path.write_bytes(before)
    seen.events.clear()

    def broken(model: Any, target: Path, *others: Any, **options: Any) -> None:
        target = next(part for part in (model, target, *others) if hasattr(part, "write_bytes"))
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    module = {"weights": torch, "torchscript": torch.jit, "pt2": torch.export}[format]
    monkeypatch.setattr(module, "save", broken)
    with pytest.raises(OSError, match="No space left") as caught:
        trainer.export(format, path, example=X)
    assert caught.value.__notes__ == [f"while Sequential was exported as {format!r} to {path}"]
    assert seen.hooks == ["on_export_start"]
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert (trainer.model.training, trainer.file, trainer.is_busy) == (True, None, False)


def test_a_model_that_cannot_be_traced(bus: EventBus, tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    model = nn.Sequential(nn.Linear(3, 1), Branching())
    with pytest.raises(Exception, match="data-dependent") as caught:
        make_trainer(bus, model=model).export("pt2", tmp_path / "model.pt2", example=X)
    assert "while Sequential was exported as 'pt2'" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_before_anything_starts(
    bus: EventBus, trainer: Trainer, tmp_path: Path
) -> None:
    seen, path = Recorder(bus, "on_export_*"), tmp_path / "model"
    with pytest.raises(ValueError, match=r"'tflite' is not known; there are: onnx, pt2, torchscript, weights"):
        trainer.export("tflite", path)
    for format in ("pt2", "torchscript", "onnx"):
        with pytest.raises(ValueError, match=rf"{format!r} traces the model: give example=\(input,\)"):
            trainer.export(format, path)
    with pytest.raises(ValueError, match=r"quantize='static' is not known; it is 'dynamic' or None"):
        trainer.export("weights", path, quantize="static")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match=r"does not go with 'pt2': .* torchao"):
        trainer.export("pt2", path, example=X, quantize="dynamic")
    with pytest.raises(ValueError, match=r"does not go with 'onnx': .*onnxruntime\.quantization\.quantize_dynamic"):
        trainer.export("onnx", path, example=X, quantize="dynamic")
    assert seen.events == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.export.find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        trainer.export("onnx", tmp_path / "model.onnx", example=X)
    assert str(caught.value) == (
        "The format 'onnx' needs onnx and onnxscript, which are not installed: pip install \"trainbus[export]\""
    )
