"""Events to bytes and back."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import json
import math
import sys
import types
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.codec import decode, encode
from eventbus.errors import DecodeError
from eventbus.events import (
    EVENTS,
    Event,
    FitEpochEnd,
    Log,
    ModelSave,
    PretrainRoutineStart,
    TrainBatchEnd,
    UnknownEvent,
)

NAN, INF = math.nan, math.inf
FORMAT_NAMES: tuple[Any, ...] = ("json", "msgpack")
FORMATS = pytest.mark.parametrize("format", FORMAT_NAMES)


def strict(data: bytes) -> Any:
    """Read JSON as a parser that knows nothing of NaN does."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(data, parse_constant=refuse)


def written(value: object, format: Any = "json") -> Any:
    """Return what `value` looks like on the other side, as one value of a log event."""
    event = decode(encode(Log(step=1, values={"key": value}), format), format)
    assert isinstance(event, Log)
    return event.values["key"]


def alike(left: Any, right: Any) -> bool:
    """Equality in which NaN is equal to NaN, and types matter."""
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(alike(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(alike, left, right))
    return type(left) is type(right) and bool(left == right)


# --------------------------------------------------------------------------------------------- what is written


def test_an_event_is_one_flat_object_whose_tag_is_hook() -> None:
    """Tag first, then the common fields, then its own, in the order of their definition."""
    event = TrainBatchEnd(seq=7, run="r", rank=0, epoch=1, batch=2, step=3, metrics={"loss": 0.5}, lr=(0.1,))
    assert encode(event) == (
        b'{"hook":"on_train_batch_end","seq":7,"time":0.0,"run":"r","rank":0,"attempt":0,"epoch":1,"batch":2,'
        b'"global_batch":0,"step":3,"metrics":{"loss":0.5},"lr":[0.1],"batch_size":null,"status":"ok"}'
    )


@pytest.mark.parametrize(("number", "text"), [(NAN, "NaN"), (INF, "Infinity"), (-INF, "-Infinity")])
def test_a_non_finite_float_is_a_string_in_json_and_a_float_again_in_typed_fields(number: float, text: str) -> None:
    """A diverged loss stays visible, wherever in the event it sits."""
    event = TrainBatchEnd(epoch=0, batch=0, step=0, time=number, metrics={"loss": number, "acc": 1.0}, lr=(number,))
    plain = strict(encode(event))
    assert (plain["time"], plain["metrics"], plain["lr"]) == (text, {"loss": text, "acc": 1.0}, [text])
    back = decode(encode(event))
    assert isinstance(back, TrainBatchEnd)
    assert alike([back.time, back.metrics["loss"], back.lr[0]], [number] * 3)


def test_a_non_finite_float_in_an_untyped_field_is_a_string_however_deep_it_is() -> None:
    """A field of any type holds JSON values, and JSON has no NaN."""
    assert written({"a": [None, {"b": (NAN, "null")}]}) == {"a": [None, {"b": ["NaN", "null"]}]}


def test_msgpack_has_non_finite_floats_of_its_own() -> None:
    """Nothing becomes a string that need not."""
    assert alike(written([NAN, INF, -INF], "msgpack"), [NAN, INF, -INF])


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Settings:
    path: Path
    lr: float = NAN


class Text(str):
    __slots__ = ()


class Ratio(float):
    __slots__ = ()


class Frozen(dict[str, Any]):
    pass


class Table(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return {"a": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


@FORMATS
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (PurePosixPath("/data/x"), "/data/x"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (datetime.date(2026, 11, 30), "2026-11-30"),
        (datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC), "2026-11-30T12:00:00Z"),
        (datetime.timedelta(seconds=3), "PT3S"),
        (decimal.Decimal("0.10"), "0.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Text("odd"), "odd"),
        (Ratio(0.5), 0.5),
        ((1, 2), [1, 2]),
        ({1}, [1]),
        (deque([1, 2]), [1, 2]),
        (Frozen(a=1), {"a": 1}),
        (Table(), {"a": 1}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (types.SimpleNamespace(a=1), {"a": 1}),
        (argparse.Namespace(a=1), {"a": 1}),
        (Settings(Path("w"), 1.0), {"path": "w", "lr": 1.0}),
        ({1: "a", 2.5: "b", None: "c", False: "d"}, {"1": "a", "2.5": "b", "null": "c", "false": "d"}),
        ({(1, "x"): 2, Colour.RED: 3, Path("p"): 4}, {'[1,"x"]': 2, "red": 3, "p": 4}),
        ("\ud800 \N{SNOWMAN} \udcff", "\\ud800 \N{SNOWMAN} \\udcff"),
        ({"\udcff": 1}, {"\\udcff": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_with_a_json_form_is_written_in_it(value: object, plain: object, format: Any) -> None:
    """What people put into a configuration or a log arrives readable, in both formats."""
    assert written(value, format) == plain


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, -(2**63), -(2**70), 10**40])
def test_an_integer_of_any_size_keeps_its_digits(number: int) -> None:
    """JSON has no largest integer; msgpack has, and carries the digits as a string beyond it."""
    assert f":{number}".encode() in encode(Log(step=number))
    assert written(number) == written([NAN, number])[1] == number
    assert int(written(number, "msgpack")) == number
    for format in FORMAT_NAMES:
        assert decode(encode(Log(step=number), format), format) == Log(step=number)


def test_bytes_are_base64_in_json_and_bytes_in_msgpack() -> None:
    """As msgspec reads them into a field of type bytes, alone or beside a value that needs care."""
    assert written(b"ab") == written([b"ab", NAN])[0] == "YWI="
    assert written(b"ab", "msgpack") == written([b"ab", 2**70], "msgpack")[0] == b"ab"


# ------------------------------------------------------------------------------------- what cannot be written


class Hostile:
    """Raises from every door that a careless encoder might try."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("hands off")

    __repr__ = __str__ = __iter__ = __len__ = __eq__ = __bool__ = __format__ = _refuse
    __getattr__ = __float__ = __int__ = __index__ = __hash__ = __reduce__ = _refuse


class HostileDict(dict[str, Any]):
    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("hands off")

    items = keys = values = __iter__ = __getitem__ = _refuse


class HostileMapping(Table):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("hands off")


class Meta(type):
    @property
    def __module__(cls) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("hands off")


class Nameless(metaclass=Meta):
    pass


@FORMATS
@pytest.mark.parametrize(
    ("value", "marker"),
    [
        (object(), "<unencodable values.key: object>"),
        (1j, "<unencodable values.key: complex>"),
        (Hostile(), f"<unencodable values.key: {__name__}.Hostile>"),
        (HostileMapping(), f"<unencodable values.key: {__name__}.HostileMapping>"),
        (Nameless(), "<unencodable values.key: object>"),
        ((i for i in (1,)), "<unencodable values.key: generator>"),
        (len, "<unencodable values.key: builtin_function_or_method>"),
        (int, "<unencodable values.key: type>"),
        (10**5_000, "<unencodable values.key: int>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_json_form_becomes_a_marker_that_names_its_key_and_type(
    value: object, marker: str, format: Any
) -> None:
    """One bad value costs itself only, and no code of its own runs."""
    assert written(value, format) == marker
    assert written([1, value], format) == [1, marker.replace("key:", "key[1]:")]


def test_a_dict_subclass_is_read_without_its_own_methods() -> None:
    """As msgspec does: an overridden method is foreign code."""
    assert written(HostileDict(a=NAN)) == {"a": "NaN"}


def test_a_key_without_a_json_form_becomes_a_marker_and_keeps_its_value() -> None:
    """Two such keys do not hide each other."""
    first, second = (f"<unencodable values.key.key {number}: object>" for number in range(2))
    assert written({object(): 1, object(): 2}) == {first: 1, second: 2}


@FORMATS
def test_a_container_that_contains_itself_ends_in_a_marker(format: Any) -> None:
    """Also where it branches, which would otherwise take for ever."""
    loop: list[Any] = [1]
    loop += [loop, {"again": loop}]
    assert written(loop, format) == [
        1,
        "<unencodable values.key[1]: list that contains itself>",
        {"again": "<unencodable values.key[2].again: list that contains itself>"},
    ]


def test_a_container_used_twice_is_written_twice() -> None:
    """Sharing is no cycle."""
    shared = [NAN]
    assert written([shared, shared]) == [["NaN"], ["NaN"]]


@FORMATS
def test_a_container_nested_too_deep_ends_in_a_marker(format: Any) -> None:
    """The marker's key is cut, so it does not grow with the depth."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    data = encode(Log(step=1, values={"key": deep}), format)
    assert b": list nested deeper than 100>" in data
    assert len(data) < 1_000


def test_an_event_is_written_even_on_the_last_frames_of_the_stack() -> None:
    """A hook may publish from anywhere."""
    event = Log(seq=3, step=1, values={"key": object()})
    written: list[bytes] = []

    def descend() -> None:
        try:
            descend()
        finally:
            written.append(encode(event))

    with pytest.raises(RecursionError):
        descend()
    assert {strict(data)["seq"] for data in written} == {3}
    assert len(written) > sys.getrecursionlimit() / 2


def test_a_format_that_does_not_exist_raises() -> None:
    """A misspelt argument is the caller's mistake, not the event's."""
    with pytest.raises(ValueError, match=r"There is no format 'yaml'\. Use 'json' or 'msgpack'."):
        encode(Log(step=1), "yaml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There is no format 'yaml'"):
        decode(b"{}", "yaml")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- reading back


@FORMATS
@pytest.mark.parametrize("cls", EVENTS.values(), ids=EVENTS)
def test_every_event_comes_back_equal(cls: type[Event], format: Any) -> None:
    """The whole vocabulary, with the fields that have no default filled in."""
    fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    required = {name: "x" if f.type is str else 1 for name, f in fields.items() if f.required}
    event = cls(seq=1, time=1.5, run="r", rank=2, attempt=3, **required)
    assert decode(encode(event, format), format) == event


@FORMATS
def test_fields_of_a_newer_version_are_ignored(format: Any) -> None:
    """A reader that is one version behind reads on."""
    data = getattr(msgspec, format).encode({"hook": "on_log", "step": 3, "phase_of_the_moon": [1]})
    assert decode(data, format) == Log(step=3)


@FORMATS
def test_an_unknown_event_encodes_unchanged(format: Any) -> None:
    """A relay passes on what it does not understand: byte for byte."""
    record = {"hook": "on_tide", "seq": 4, "run": "r", "level": [None, 1.0, {"b": 2**40, "a": "NaN"}], "rank": "odd"}
    data = getattr(msgspec, format).encode(record)
    event = decode(data, format)
    assert isinstance(event, UnknownEvent)
    assert event.hook == record.pop("hook")
    assert event.fields == record
    assert (event.seq, event.run, event.rank) == (4, "r", None)
    assert encode(event, format) == data


def test_an_unknown_event_is_written_with_what_the_bus_stamped_on_it() -> None:
    """The copy that a bus publishes has a new `seq`, and keeps its place in the object."""
    event = decode(b'{"hook":"on_tide","seq":4,"level":1}')
    stamped = msgspec.structs.replace(event, seq=9, run="here")
    assert encode(stamped) == b'{"hook":"on_tide","seq":9,"level":1,"run":"here"}'
    made = UnknownEvent(hook="on_tide", fields={"hook": "spoof", "level": NAN, "where": Path("p")})
    assert encode(made) == b'{"hook":"on_tide","level":"NaN","where":"p"}'


def test_the_base_event_is_written_with_its_hook() -> None:
    """It has no type of its own, so it comes back as unknown."""
    assert decode(encode(Event(seq=2))) == UnknownEvent(hook="*", fields={"seq": 2}, seq=2)


@FORMATS
def test_an_event_that_a_user_defines_is_decoded_at_once_and_so_is_its_next_definition(format: Any) -> None:
    """A notebook cell that runs again replaces the class."""
    hook = f"on_codec_{format}_spike"
    data = getattr(msgspec, format).encode({"hook": hook, "norm": 2.0})
    assert type(decode(data, format)) is UnknownEvent

    def define() -> type[Event]:
        class CodecSpike(Event, hook=hook):
            norm: float

        return CodecSpike

    for cls in (define() for _ in range(2)):
        event = msgspec.convert({"hook": hook, "norm": 2.0}, cls)
        assert type(decode(data, format)) is cls
        assert decode(encode(event, format), format) == event


@FORMATS
def test_a_typed_path_or_bytes_field_comes_back_in_its_type(format: Any) -> None:
    """What has a JSON form and a type is restored from both."""

    class CodecArtifact(Event):
        path: Path
        digest: bytes = b""
        when: datetime.datetime | None = None

    event = CodecArtifact(path=Path("a/b"), digest=b"\xff", when=datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC))
    assert decode(encode(event, format), format) == event


@FORMATS
def test_a_marker_where_the_class_wants_a_number_gives_an_unknown_event_with_everything_else(format: Any) -> None:
    """A log line with one bad metric can still be read."""
    event = TrainBatchEnd(epoch=1, batch=2, step=3, metrics={"loss": object()})  # type: ignore[dict-item]
    back = decode(encode(event, format), format)
    assert isinstance(back, UnknownEvent)
    assert (back.hook, back.fields["batch"]) == ("on_train_batch_end", 2)
    assert back.fields["metrics"] == {"loss": "<unencodable metrics.loss: object>"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "These 0 bytes are no json event: Input data was truncated"),
        (b"{", "These 1 bytes are no json event: Input data was truncated"),
        (b'{"hook":"on_log","step":NaN}', "These 28 bytes are no json event: JSON is malformed"),
        (b"[1]", "are no json event: Expected `object`, got `array`"),
        (b'{"step":1}', "are no json event: Object missing required field `hook`"),
        (b'{"hook":1}', "are no json event: Expected `str`, got `int`"),
        (b'{"hook":"\xff"}', "are no json event: Invalid UTF-8"),
        (b"[" * 100_000, "are no json event: "),
        (b'{"hook":"on_log"}', "on_log does not fit eventbus.events.Log: Object missing required field `step`"),
        (b'{"hook":"on_log","step":"3"}', "on_log does not fit eventbus.events.Log: Expected `int`, got `str`"),
        (b'{"hook":"on_log","step":1.5}', "on_log does not fit eventbus.events.Log: Expected `int`, got `float`"),
    ],
)
def test_bytes_that_are_no_event_raise_a_decode_error_that_says_why(data: bytes, message: str) -> None:
    """From the cause, and without the payload, which may hold secrets."""
    with pytest.raises(DecodeError, match=message) as caught:
        decode(data)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4hook", b"\x93\x01\x02\x03", b"\x81\xa4hook\xa2\xff\xff"])
def test_bytes_that_are_no_msgpack_raise_a_decode_error(data: bytes) -> None:
    """The same promise in the other format."""
    with pytest.raises(DecodeError, match="are no msgpack event: "):
        decode(data, "msgpack")


def test_a_class_whose_annotation_cannot_be_resolved_raises_a_decode_error() -> None:
    """Its events can be written, and the message says what is missing to read them."""

    class Local:
        pass

    class CodecLocal(Event):
        value: Local | None = None

    with pytest.raises(DecodeError, match=r"on_codec_local does not fit .*CodecLocal: name 'Local' is not defined"):
        decode(encode(CodecLocal()))


# ------------------------------------------------------------------------------------------------- properties

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers() | st.integers(-(2**100), 2**100)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | integers | finite | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
metrics = st.dictionaries(text, st.floats(), max_size=4)
junk = st.recursive(
    st.none()
    | integers
    | st.floats()
    | st.text(st.characters(), max_size=4)
    | st.binary(max_size=4)
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.complex_numbers()
    | st.uuids()
    | st.builds(Hostile)
    | st.builds(HostileMapping)
    | st.builds(object)
    | st.sampled_from([Colour.RED, Level.HIGH, Path("p"), Nameless(), int, print, ...]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(
            st.text(st.characters(), max_size=3) | integers | st.floats() | st.booleans(), inner, max_size=3
        )
        | st.dictionaries(st.none() | st.tuples(integers, st.dates()), inner, max_size=3).map(types.MappingProxyType)
        | st.builds(Settings, inner, inner)
        | st.dictionaries(text, inner, max_size=3).map(HostileDict)
    ),
    max_leaves=15,
)


@given(st.dictionaries(text, json_values, max_size=4), integers, finite, st.none() | text)
def test_json_native_values_come_back_equal(values: dict[str, Any], step: int, time: float, run: str | None) -> None:
    """`decode(encode(e)) == e`, with the types and the order of the keys."""
    event = Log(seq=1, time=time, run=run, step=step, values=values)
    back = decode(encode(event))
    assert back == event
    assert isinstance(back, Log)
    assert alike(back.values, values)
    assert strict(encode(event))["values"] == values


@given(st.dictionaries(text, json_values, max_size=4), metrics)
def test_msgpack_carries_what_json_carries(values: dict[str, Any], numbers: dict[str, float]) -> None:
    """Equal, except for an untyped integer beyond 64 bit, which stays a string of digits."""
    event = FitEpochEnd(epoch=1, metrics=numbers)
    back = decode(encode(event, "msgpack"), "msgpack")
    assert isinstance(back, FitEpochEnd)
    assert alike(back.metrics, numbers)
    log = decode(encode(Log(step=1, values=values), "msgpack"), "msgpack")
    assert isinstance(log, Log)
    assert log.values == shortened(values)


def shortened(value: Any) -> Any:
    """Return `value` with the integers beyond 64 bit as digits."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return str(value) if type(value) is int and not -(2**63) <= value < 2**64 else value


@given(metrics, st.lists(st.floats(), max_size=3), st.floats())
def test_floats_of_any_kind_come_back_in_typed_fields(numbers: dict[str, float], lr: list[float], time: float) -> None:
    """NaN equal to NaN, infinities with their sign."""
    event = FitEpochEnd(epoch=1, time=time, metrics=numbers, lr=tuple(lr), fitness=time)
    strict(encode(event))
    back = decode(encode(event))
    assert isinstance(back, FitEpochEnd)
    assert alike([back.metrics, list(back.lr), back.time, back.fitness], [numbers, lr, time, time])


@given(junk, st.text(st.characters(), max_size=5))
def test_whatever_is_in_an_event_it_is_written_as_strict_json_and_as_msgpack(value: Any, key: str) -> None:
    """Encoding never raises, and what it wrote can be read."""
    for event in (
        Log(step=1, values={key: value}),
        PretrainRoutineStart(config=value, name=key),
        ModelSave(path=value, value=value),
        UnknownEvent(hook=key, fields={key: value}, run=value),
        UnknownEvent(hook=key, fields={"run": value}, run="r"),
        UnknownEvent(hook=key, fields=value),
        Event(run=value),
    ):
        assert isinstance(strict(encode(event)), dict)
        assert isinstance(msgspec.msgpack.decode(encode(event, "msgpack")), dict)
    assert isinstance(decode(encode(Log(step=1, values={key: value}))), Log)
    assert isinstance(decode(encode(Log(step=1, values={key: value}), "msgpack"), "msgpack"), Log)


@given(st.dictionaries(text, json_values, max_size=4))
def test_a_value_that_needs_care_changes_nothing_about_the_others(values: dict[str, Any]) -> None:
    """The fast and the careful way write the same."""
    quick = strict(encode(Log(step=1, values={"rest": values})))["values"]["rest"]
    careful = strict(encode(Log(step=1, values={"rest": values, "nan": NAN})))["values"]["rest"]
    assert alike(quick, careful)


@given(text.filter(lambda name: name not in EVENTS), st.dictionaries(text, json_values, max_size=4))
def test_any_unknown_event_encodes_to_the_same_bytes(hook: str, fields: dict[str, Any]) -> None:
    """Same keys, same order, same values."""
    fields.pop("hook", None)
    data = msgspec.json.encode({"hook": hook, **fields})
    assert encode(decode(data)) == data


@given(st.binary(max_size=60) | st.sampled_from([b'{"hook":"on_log","step":1}', b"{}"]).map(bytes))
def test_any_bytes_are_an_event_or_a_decode_error(data: bytes) -> None:
    """No other exception leaves `decode`."""
    for format in FORMAT_NAMES:
        try:
            assert isinstance(decode(data, format), Event)
        except DecodeError:
            pass
