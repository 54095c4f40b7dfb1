"""Frozen dataclasses as JSON and arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from rcir import trust
from rcir.errors import InvalidConfig, InvalidData, UntrustedFolder
from rcir.store.codec import NOT_STORED, Array, convert, decode, encode, read, register, write


class Shape:
    pass


@register
@dataclass(frozen=True)
class Circle(Shape):
    __module__ = "rcir.shapes"  # only classes of rcir are stored by their names
    radius: float


@register
@dataclass(frozen=True)
class Square(Shape):
    __module__ = "rcir.shapes"
    name = "a square"
    side: float | None


@register
@dataclass(frozen=True)
class Strange(Shape):  # of another package: found by its import path
    corners: int


@runtime_checkable
class Sized(Protocol):
    @property
    def unit(self) -> str: ...


@register
@dataclass(frozen=True)
class Metres:
    __module__ = "rcir.units"
    unit: str = "m"


class Rational:
    """A class with a conversion."""

    def __init__(self, numerator, denominator):
        self.parts = (numerator, denominator)

    def __eq__(self, other):
        return self.parts == other.parts


convert(Rational, tuple[int, int], lambda value: value.parts, lambda parts: Rational(*parts))


def numbers(dtype, rank, **elements):
    shapes = arrays_of.array_shapes(min_dims=rank, max_dims=rank, min_side=0, max_side=3)
    return arrays_of.arrays(dtype, shapes, elements=elements or None)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
REALS = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(-(2**63), 2**63 - 1)
STRINGS = st.lists(WORDS, max_size=4).map(lambda texts: np.array(texts, np.str_))
CIRCLES = st.builds(Circle, REALS)
FINITE = {"allow_nan": False, "allow_infinity": False}
JSON = st.recursive(
    st.none() | st.booleans() | WHOLE | REALS | WORDS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(WORDS, values, max_size=3),
    max_leaves=5,
)
# By name: annotation, values, one value, and JSON that is none.
FIELDS = {
    "flag": (bool, st.booleans(), True, [1, None, "true"]),
    "number": (int, WHOLE | WHOLE.map(np.int64), 3, [1.5, True, "1", None]),
    "real": (float, REALS | REALS.map(np.float64), 0.5, [np.nan, np.inf, 10**400, True, "1"]),
    "text": (str | None, st.none() | WORDS, "text", [1, ["text"]]),
    "choice": (Literal["a", 1] | None, st.sampled_from([None, "a", 1]), "a", ["b", True, 1.0]),
    "plain": (Any, JSON, {"list": [None, 1.5]}, [np.nan, {"x": [np.inf]}]),
    "shape": (Shape, CIRCLES | st.builds(Square, st.none() | REALS), Square(2.0), [
        None, 1, {"radius": 1.0}, {"class": "Triangle"}, {"class": "Metres", "unit": "m"},
        {"class": ["Circle"], "radius": 1.0}, {"class": "Circle"},
        {"class": "Circle", "radius": 1.0, "colour": 1},
    ]),
    "sized": (Sized, st.builds(Metres, WORDS), Metres(), [{"unit": "m"}, {"class": "Circle"}]),
    "ratio": (Rational | None, st.none() | st.builds(Rational, WHOLE, WHOLE), Rational(1, 2),
              [[1], [1, 2, 3], [1, "2"], 1]),
    "pair": (tuple[int, str], st.tuples(WHOLE, WORDS), (1, "b"), [[1], ["b", 1], {}]),
    "several": (tuple[float, ...], st.lists(REALS).map(tuple), (0.5,), [[None], "text", {}]),
    "sequence": (Sequence[Circle], st.lists(CIRCLES).map(tuple), (Circle(1.0),), [[1.0], 7]),
    "by_name": (Mapping[str, float], st.dictionaries(WORDS, REALS), {"x": 1.0}, [[], {"x": "y"}]),
    "by_choice": (Mapping[Literal["a"] | None, list[int]],
                  st.dictionaries(st.sampled_from([None, "a"]), st.lists(WHOLE)), {None: [1]},
                  [{"a": [1]}, [["b", [1]]], [[None, [1], 2]]]),
    "by_pair": (dict[tuple[int, str], bool], st.dictionaries(st.tuples(WHOLE, WORDS),
                st.booleans()), {(1, "b"): True}, [[[[1], True]], [[1, True]]]),
    "floats": (Annotated[NDArray[np.float64], Array(1)], numbers(np.float64, 1, **FINITE),
               np.ones(2), [None, [1.0], "floats", {"array": "floats"},
               {"array": "none", "dtype": "float64"}, {"array": "floats", "dtype": "float32"},
               {"array": ["floats"], "dtype": "float64"}]),
    "scores": (Annotated[NDArray[np.float32], Array(2, infinite=True)],
               numbers(np.float32, 2, allow_nan=False).map(np.asfortranarray),
               np.full((2, 3), np.inf, np.float32), [{"array": "floats", "dtype": "float64"}]),
    "mask": (NDArray[np.bool_] | None, st.none() | numbers(np.bool_, 2), None, [1]),
    "whole": (NDArray[np.integer[Any]], numbers(np.int32, 1) | numbers(np.uint64, 2),
              np.arange(3), [{"array": "floats", "dtype": "float64"}]),
    "digests": (NDArray[np.bytes_], numbers("S2", 1) | numbers("S3", 2), np.array([b"ab"]),
                [{"array": "digests", "dtype": "S3"}, {"array": "floats", "dtype": "S2"}]),
    "names": (NDArray[np.str_], STRINGS, np.array(["x", "yz"]),
              [{"array": "whole", "dtype": "str"}, {"array": "digests", "dtype": "str"}]),
    "ids": (NDArray[np.object_], STRINGS.map(lambda names: names.astype(object)),
            np.array(["x"], object), [{"array": "names", "dtype": "str"}]),
    "anything": (NDArray[Any], STRINGS | numbers(np.float16, 2, **FINITE) | numbers(np.uint8, 1),
                 np.arange(4), [None]),
}  # fmt: skip
NOT_INITIALISED = field(default_factory=dict, init=False)
Everything = make_dataclass(
    "Everything",
    [
        *((name, row[0]) for name, row in FIELDS.items()),
        ("memory", dict, NOT_INITIALISED),
        ("image", Any, field(default=None, metadata=NOT_STORED)),
    ],
    frozen=True,
    eq=False,
)
EVERYTHING = st.builds(Everything, **{name: row[1] for name, row in FIELDS.items()})


@dataclass(frozen=True, eq=False)
class Outer:
    inner: Everything
    copies: Mapping[str, Everything]


def same(one, other):
    """Return whether two values are of one type and equal, arrays and dataclasses included."""
    if isinstance(one, np.ndarray):
        equal = one.dtype == other.dtype or one.dtype.kind == other.dtype.kind == "U"
        return equal and np.array_equal(one, other)
    if isinstance(one, Everything):
        return all(same(value, getattr(other, name)) for name, value in vars(one).items())
    return one == other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("codec")


@settings(max_examples=30, deadline=None)
@given(EVERYTHING)
def test_everything_is_read_as_it_was_written(folder, value):
    write(value, folder, "it")
    restored = read(Everything, folder, "it")
    assert same(value, restored)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    write(restored, folder, "it")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_array_is_stored_whose_annotation_is_an_alias():
    """`NDArray` is an alias by a `type` statement since NumPy 2.5."""
    kind = TypeVar("kind", bound=np.generic)
    array = np.ndarray[tuple[Any, ...], np.dtype[kind]]
    alias = TypeAliasType("alias", array, type_params=(kind,))
    annotation = Annotated[alias[np.float64], Array(rank=1)]
    plain, arrays = encode([np.arange(3.0)], list[annotation])
    (restored,) = decode(list[annotation], plain, arrays)
    np.testing.assert_array_equal(restored, np.arange(3.0), strict=True)
    with pytest.raises(InvalidData, match="float64"):
        encode([np.zeros(3, complex)], list[annotation])


@pytest.fixture
def example():
    return Everything(**{name: row[2] for name, row in FIELDS.items()})


def test_equal_arrays_are_stored_once_and_fields_that_are_not_stored_are_left_out(example):
    copied = replace(example, floats=example.floats.copy(), image="an image")
    plain, arrays = encode(Outer(example, {"copy": copied}))
    assert len(arrays) == len(encode(example)[1])
    restored = decode(Outer, plain, arrays)
    assert same(restored.copies["copy"], example)
    assert restored.inner.floats is restored.copies["copy"].floats


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_does_not_match_its_annotation_is_refused(example, name):
    plain, arrays = encode(example)
    for wrong in FIELDS[name][3]:
        with pytest.raises(InvalidData, match=name):
            decode(Everything, plain | {name: wrong}, arrays)


UNREADABLE = {
    "floats": [np.ones(2, complex), np.ones((2, 1)), np.array([1, np.inf]), [1.0]],
    "scores": [np.ones((1, 2)), np.array([[1, np.nan]], np.float32)],
    "mask": [np.ones(1)],
    "whole": [np.ones(3)],
    "names": [np.array([["x"]]), np.array(["x"], object)],
    "ids": [np.array(["x", 1], object)],
    "anything": [np.ones(2, complex), np.ones(2, np.longdouble)],
    "real": [np.nan],
    "choice": ["c"],
    "plain": [{1: 2}, object()],
    "shape": [None, 3],
    "sized": [3],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_could_not_be_read_is_not_written(example, name):
    for wrong in UNREADABLE[name]:
        with pytest.raises(InvalidData, match=name):
            encode(replace(example, **{name: wrong}))


def test_numbers_of_smaller_types_are_widened(example):
    for values in (np.arange(2), np.ones(2, np.float32), np.array([True, False])):
        plain, arrays = encode(replace(example, floats=values))
        assert same(decode(Everything, plain, arrays).floats, values.astype(np.float64))


def test_missing_and_unknown_fields_and_arrays_are_refused(example):
    plain, arrays = encode(example)
    for changed in ({**plain, "colour": 1}, {k: v for k, v in plain.items() if k != "real"}):
        with pytest.raises(InvalidData, match="missing or unknown"):
            decode(Everything, changed, arrays)
    with pytest.raises(InvalidData, match="more"):
        decode(Everything, plain, arrays | {"more": np.ones(1)})
    for changed in (arrays["names"][:-1], np.frombuffer(b"[1, 2]", np.uint8)):
        with pytest.raises(InvalidData, match="names"):
            decode(Everything, plain, arrays | {"names": changed})


def test_a_class_of_another_package_is_named_by_its_path_and_needs_permission(example):
    plain, arrays = encode(replace(example, shape=Strange(4)))
    path = plain["shape"]["class"]
    assert path == f"{__name__}:Strange"
    with trust.reading(), pytest.raises(UntrustedFolder, match=path):
        decode(Everything, plain, arrays)
    with trust.reading(code=True):
        assert decode(Everything, plain, arrays).shape == Strange(4)


def test_a_class_cannot_take_the_name_of_another_one():
    with pytest.raises(InvalidConfig, match="Circle"):
        register(make_dataclass("Circle", [], frozen=True))
    assert register(Circle) is Circle


def test_only_frozen_dataclasses_of_modules_are_stored():
    @dataclass
    class Mutable:
        number: int

    script = make_dataclass(
        "Script", [], bases=(Shape,), frozen=True, namespace={"__module__": "__main__"}
    )
    for value, word in ((Mutable(1), "frozen"), (object(), "frozen"), (script(), "module")):
        with pytest.raises(InvalidConfig, match=word):
            encode(value, Shape if word == "module" else None)
