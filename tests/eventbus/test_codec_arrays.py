"""Values of numpy and torch in events; the codec knows them by their shape and imports neither."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.codec import decode, encode
from eventbus.events import Log, TrainBatchEnd

np = pytest.importorskip("numpy")
NAN = math.nan


def written(value: object, format: Any = "json") -> Any:
    """Return what `value` looks like on the other side, as one value of a log event."""
    event = decode(encode(Log(step=1, values={"key": value}), format), format)
    assert isinstance(event, Log)
    return event.values["key"]


@pytest.mark.parametrize("format", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(5), 5),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.datetime64("2026-11-30"), "2026-11-30"),
        (np.array([[2.5]]), 2.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([]), []),
        (np.array(["a", None], dtype=object), ["a", None]),
        ({np.int64(3): 1, np.str_("k"): 2}, {"3": 1, "k": 2}),
        (np.complex64(1j), "<unencodable values.key: complex>"),
        (np.zeros((50, 50)), "<unencodable values.key: numpy.ndarray of shape (50, 50)>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_numpy_value_is_written_in_its_json_form(value: object, plain: object, format: Any) -> None:
    """One element is a number, a small array a list, and a large one a marker with its shape."""
    assert written(value, format) == plain


def test_a_torch_value_is_written_in_its_json_form() -> None:
    """Tensors of one element are numbers, small ones lists; devices and dtypes are their names."""
    torch = pytest.importorskip("torch")
    value = {
        "loss": torch.tensor(0.5, requires_grad=True),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "nan": torch.tensor(NAN),
        "ap": torch.tensor([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "empty": torch.empty(2, device="meta"),
        "lost": torch.empty(1, device="meta"),
        "model": torch.nn.Linear(1, 1),
    }
    assert written(value) == {
        "loss": 0.5,
        "half": 1.5,
        "nan": "NaN",
        "ap": [1, 2],
        "device": "cpu",
        "dtype": "torch.float32",
        "size": [2, 3],
        "parameter": [0.0, 0.0],
        "empty": "<unencodable values.key.empty: torch.Tensor of shape (2,)>",
        "lost": "<unencodable values.key.lost: torch.Tensor>",
        "model": "<unencodable values.key.model: torch.nn.modules.linear.Linear>",
    }


@given(st.floats(width=32), st.lists(st.floats(width=32), min_size=2, max_size=4))
def test_a_numpy_metric_comes_back_as_the_float_it_was(number: float, several: list[float]) -> None:
    """In the typed fields, where NaN is equal to NaN."""
    event = TrainBatchEnd(epoch=0, batch=0, step=0, metrics={"loss": np.float32(number)}, lr=np.array(several))
    back = decode(encode(event))
    assert isinstance(back, TrainBatchEnd)
    np.testing.assert_array_equal([back.metrics["loss"], *back.lr], [number, *several])


def test_neither_torch_nor_numpy_is_imported_by_the_codec() -> None:
    """A service that only listens has neither."""
    code = "import sys, eventbus.codec; print({'numpy', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
