"""Writing the trained model for use elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from eventbus.events import ExportEnd, ExportStart
from trainer.devices import evaluating, move, unwrapped
from trainer.weights import averaged_weights

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["FORMATS", "ExportJob", "export"]


class ExportJob(NamedTuple):
    """What to export, and how."""

    format: str
    path: Path
    #: The arguments of one call of the model; None when it is not to be traced.
    example: tuple[Any, ...] | None = None
    quantize: Literal["dynamic"] | None = None
    #: For the function of torch that does it.
    options: Mapping[str, Any] = {}


def export(trainer: Trainer, job: ExportJob) -> Path:
    """Write the model in a format of `FORMATS`; an export that fails raises, and no `on_export_end` follows."""
    _check(job)
    format, path, run, started = job.format, job.path, trainer.progress, monotonic()
    with trainer.showing(file=path):
        run.publish(ExportStart, format=format, path=str(path))
        try:
            with _replacing(path) as temporary, averaged_weights(trainer):
                _write(trainer, job, temporary)
        except Exception as error:
            error.add_note(f"while {type(unwrapped(trainer.model)).__name__} was exported as {format!r} to {path}")
            raise
        run.publish(ExportEnd, format=format, path=str(path), bytes=path.stat().st_size, seconds=monotonic() - started)
    return path


def _check(job: ExportJob) -> None:
    """Raise `ValueError` for what cannot be done, and `ImportError` for a package that it needs."""
    format = FORMATS.get(job.format)
    if format is None:
        raise ValueError(f"The format {job.format!r} is not known; there are: {', '.join(sorted(FORMATS))}.")
    if format.is_traced and job.example is None:
        raise ValueError(
            f"The format {job.format!r} traces the model: give example=(input,), the arguments of one call."
        )
    if job.quantize not in (None, "dynamic"):
        raise ValueError(f"quantize={job.quantize!r} is not known; it is 'dynamic' or None.")
    if job.quantize and format.unquantized_because:
        raise ValueError(f"quantize={job.quantize!r} does not go with {job.format!r}: {format.unquantized_because}")
    missing = [name for name in format.needs if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"The format {job.format!r} needs {' and '.join(missing)}, which {are} not installed: "
            'pip install "trainbus[export]"'
        )


def _write(trainer: Trainer, job: ExportJob, path: Path) -> None:
    model, device = unwrapped(trainer.model), trainer.device
    if job.quantize:
        model, device = _quantized(model), torch.device("cpu")
    example = move(job.example or (), next((parameter.device for parameter in model.parameters()), device))
    with evaluating(model):
        FORMATS[job.format].write(model, path, example, job.options)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A place to write to; what was written there takes the place of `path`, when it is complete and not before.

    A format may write more than one file (ONNX with external data): the one that refers to the others comes last.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder, path.name)
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.with_name(file.name))


def _quantized(model: nn.Module) -> nn.Module:
    """A copy on the CPU whose linear and recurrent layers compute in 8 bits, scaled anew for each input."""
    from torch.ao.quantization import quantize_dynamic  # torch means to move it to a package of its own

    layers = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
    copied = deepcopy(model).cpu().eval()
    quantized: nn.Module = quantize_dynamic(copied, layers, dtype=torch.qint8, inplace=True)  # type: ignore[no-untyped-call]
    return quantized


def _weights(model: nn.Module, path: Path, example: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    torch.save(model.state_dict(), path, **options)


def _script(model: nn.Module, path: Path, example: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    torch.jit.save(torch.jit.trace(model, example, **options), path)  # type: ignore[no-untyped-call]


def _program(model: nn.Module, path: Path, example: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    torch.export.save(torch.export.export(model, example, **options), path)


def _onnx(model: nn.Module, path: Path, example: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    chosen = {"external_data": False, "verbose": False} | dict(options)  # one file, unless two are asked for
    torch.onnx.export(model, example, str(path), **chosen)


class Format(NamedTuple):
    """How a format is written."""

    write: Callable[[nn.Module, Path, tuple[Any, ...], Mapping[str, Any]], None]
    is_traced: bool = True
    #: Packages besides torch, those of the extra "export".
    needs: tuple[str, ...] = ()
    #: Why a quantised model cannot be written, and what can be done instead; empty when it can be.
    unquantized_because: str = ""


FORMATS = {
    "onnx": Format(
        _onnx,
        needs=("onnx", "onnxscript"),
        unquantized_because="export it as it is, then give the file to onnxruntime.quantization.quantize_dynamic.",
    ),
    "pt2": Format(
        _program, unquantized_because="torch.export cannot take such a model apart; quantise it with torchao before."
    ),
    "torchscript": Format(_script),
    "weights": Format(_weights, is_traced=False),
}
