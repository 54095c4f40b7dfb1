"""Frozen dataclasses as JSON and safetensors, checked against their annotations.

`encode` turns a frozen dataclass into plain values, which JSON can hold, and arrays by name;
`decode` turns them back. Both check every field against its annotation, so that what is written can
be read, and what was damaged or made up is refused:

    bool, int, float, str, Literal, | None   floats are finite
    tuple, Sequence, list, Mapping, dict     mappings whose keys are not strings are lists of pairs
    NDArray[dtype]                           in safetensors, equal arrays once; see `Array`
    frozen dataclasses                       an object of their fields, none missing or unknown
    base classes and protocols               the same, with the name of a registered class
    Any                                      whatever JSON can hold
    classes with a conversion                what they are converted to, see `convert`

Fields that `__init__` does not accept, or whose metadata is `NOT_STORED`, are left out. A class of
another package is named by its import path, "package.module:Class", and is imported only with
permission, see `rcir.trust`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from inspect import isabstract
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.imports import find_class, import_path

T = TypeVar("T")
Class = TypeVar("Class", bound=type[Any])
NOT_STORED: Mapping[str, Any] = {"stored": False}
CLASS, ARRAY, DTYPE = "class", "array", "dtype"  # keys of objects in JSON beside fields
SCALARS: Mapping[Any, Any] = {bool: (bool, np.bool_), int: Integral, float: Real, str: str}
SEQUENCES, MAPPINGS, UNIONS = (tuple, list, Sequence), (dict, Mapping), (Union, UnionType)
TEXTS: Mapping[str, Any] = {"str": np.str_, "object": np.object_}  # dtypes of arrays of strings
WIDENED = (np.int64, np.float64)  # dtypes as which numbers of smaller ones are stored

_registered: dict[str, type[Any]] = {}
_annotations: dict[Any, Mapping[str, Any]] = {}  # of stored fields, by class and name
_conversions: dict[Any, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {}


@dataclass(frozen=True)
class Array:
    """The contents of an array with the annotation `Annotated[NDArray[dtype], Array(rank)]`."""

    rank: int | None = None  # number of dimensions; None for any; 1 of arrays of strings
    infinite: bool = False  # True if numbers may be infinite; NaN is always refused


def register(kind: Class) -> Class:
    """Register a class of rcir that is stored where an annotation names its base or protocol.

    It is stored under its attribute `name`, or else under that of the class, which is unique.
    """
    name = getattr(kind, "name", kind.__name__)
    if import_path(_registered.get(name, kind)) != import_path(kind):
        raise InvalidConfig(f"{name!r} is already the name of {import_path(_registered[name])}")
    _registered[name] = kind
    return kind


def convert(kind: Any, stored: Any, to: Callable[[Any], Any], back: Callable[[Any], Any]) -> None:
    """Store values of a class as another type, which `to` returns and `back` accepts."""
    _conversions[kind] = stored, to, back


def encode(value: Any, kind: Any = None) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Return plain values for JSON, and arrays by name, of a value with annotation `kind`.

    Raises `InvalidData` if something does not match, `InvalidConfig` for a class not to be stored.
    """
    writer = _Writer()
    return writer.visit(type(value) if kind is None else kind, value, ""), writer.arrays


def decode(kind: type[T], plain: Any, arrays: Mapping[str, NDArray[Any]]) -> T:
    """Return the value that was encoded as a class or with an annotation.

    Raises `InvalidData` if something does not match its annotation or an array is not in use, what
    `rcir.imports.find_class` raises, and whatever the classes raise.
    """
    reader = _Reader(arrays)
    value: T = reader.visit(kind, plain, "")
    if unused := arrays.keys() - {name for name, _ in reader.restored}:
        raise InvalidData(f"arrays that no field refers to: {', '.join(sorted(unused))}")
    return value


def write(value: Any, folder: Path, name: str) -> None:
    """Write a frozen dataclass to NAME.json and, if it has arrays, NAME.safetensors in a folder."""
    from safetensors.numpy import save

    plain, arrays = encode(value)
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1, allow_nan=False))
    if arrays:
        (folder / f"{name}.safetensors").write_bytes(save(arrays))


def read(kind: type[T], folder: Path, name: str) -> T:
    """Return what `write` wrote; raises what `decode` does, and errors of the files."""
    from safetensors.numpy import load_file

    plain = json.loads((folder / f"{name}.json").read_text())
    path = folder / f"{name}.safetensors"
    return decode(kind, plain, load_file(path) if path.is_file() else {})


class _Codec(ABC):
    """Walks through a value by its annotation, which is the same in both directions."""

    @abstractmethod
    def array(self, dtype: Any, array: Array, value: Any, place: str) -> Any:
        """Return a reference to an array, or the array of a reference."""

    @abstractmethod
    def pairs(self, kind: Any, value: Any, place: str) -> Any:
        """Return a mapping as a list of pairs, which has the annotation `kind`, or the mapping."""

    @abstractmethod
    def instance(self, kind: Any, value: Any, place: str) -> Any:
        """Return the fields of an instance of a class, or the instance."""

    def visit(self, kind: Any, value: Any, place: str) -> Any:
        """Return a value encoded or decoded; `place` says where it is, such as "rules.0.bound"."""
        array = Array()
        if get_origin(kind) is Annotated:
            kind, array = get_args(kind)
        kind = _without_alias(kind)
        if kind is Any:
            kind = _kind_in_json(value)
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin in UNIONS:
            (kind,) = set(arguments) - {NoneType}
            return None if value is None else self.visit(kind, value, place)
        if origin is Literal:
            if not any(type(value) is type(choice) and value == choice for choice in arguments):
                raise _wrong(place, f"one of {', '.join(map(repr, arguments))}", value)
            return value
        if kind in SCALARS:
            return _scalar(kind, value, place)
        if origin in SEQUENCES:
            return self._sequence(origin, arguments, value, place)
        if origin in MAPPINGS:
            return self._mapping(arguments, value, place)
        if origin is np.ndarray:
            (dtype,) = get_args(arguments[1])
            return self.array(get_origin(dtype) or dtype, array, value, place)
        return self.instance(kind, value, place)

    def _sequence(self, origin: Any, kinds: Sequence[Any], value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(place, "a list", value)
        if origin is not tuple or kinds[-1] is Ellipsis:
            kinds = [kinds[0]] * len(value)
        if len(value) != len(kinds):
            raise _wrong(place, f"a list of length {len(kinds)}", value)
        visited = [
            self.visit(kind, part, f"{place}.{number}")
            for number, (kind, part) in enumerate(zip(kinds, value, strict=True))
        ]
        return visited if origin is list else tuple(visited)

    def _mapping(self, kinds: Any, value: Any, place: str) -> Any:
        if kinds[0] is not str:
            return self.pairs(list[tuple[kinds]], value, place)
        if not isinstance(value, Mapping):
            raise _wrong(place, "an object", value)
        return {
            _scalar(str, name, place): self.visit(kinds[1], part, f"{place}.{name}")
            for name, part in value.items()
        }


class _Writer(_Codec):
    """Encodes; `arrays` are those of all values that were encoded."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by dtype, shape and digest of the content

    def array(self, dtype: Any, array: Array, value: Any, place: str) -> Any:
        if dtype in WIDENED and isinstance(value, np.ndarray) and np.can_cast(value.dtype, dtype):
            value = value.astype(dtype, copy=False)
        _check_array(dtype, array, value, place)
        kind, name = value.dtype.kind, value.dtype.name
        if kind in "OU":
            name = "object" if kind == "O" else "str"
            stored = np.frombuffer(json.dumps(value.tolist()).encode(), np.uint8)
        elif kind == "S":
            name = f"S{value.dtype.itemsize}"
            stored = np.ascontiguousarray(value)[..., None].view(np.uint8)
        else:
            stored = np.asarray(value, value.dtype.newbyteorder("="), order="C")
        key = stored.dtype, stored.shape, blake2b(stored.data).digest()
        reference = self._names.setdefault(key, place)
        self.arrays.setdefault(reference, stored)
        return {ARRAY: reference, DTYPE: name}

    def pairs(self, kind: Any, value: Any, place: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(place, "an object", value)
        return self.visit(kind, list(value.items()), place)

    def instance(self, kind: Any, value: Any, place: str) -> Any:
        if not isinstance(value, kind):
            raise _wrong(place, kind.__name__, value)
        if kind in _conversions:
            stored, to, _ = _conversions[kind]
            return self.visit(stored, to(value), place)
        actual = type(value)
        plain = {} if actual is kind else {CLASS: _name_of(actual)}
        for name, annotation in _fields(actual).items():
            plain[name] = self.visit(annotation, getattr(value, name), _join(place, name))
        return plain


class _Reader(_Codec):
    """Decodes; `restored` has the arrays that were referred to, by name and dtype."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.restored: dict[tuple[str, str], NDArray[Any]] = {}
        self._arrays = arrays

    def array(self, dtype: Any, array: Array, value: Any, place: str) -> Any:
        if not isinstance(value, dict) or value.keys() != {ARRAY, DTYPE}:
            raise _wrong(place, "an object that names an array", value)
        name, stored_dtype = key = str(value[ARRAY]), str(value[DTYPE])
        if name not in self._arrays:
            raise InvalidData(f"{place}: there is no array {name!r}")
        if key not in self.restored:
            self.restored[key] = _restore(self._arrays[name], stored_dtype, place)
        _check_array(dtype, array, self.restored[key], place)
        return self.restored[key]

    def pairs(self, kind: Any, value: Any, place: str) -> Any:
        return dict(self.visit(kind, value, place))

    def instance(self, kind: Any, value: Any, place: str) -> Any:
        if kind in _conversions:
            stored, _, back = _conversions[kind]
            return back(self.visit(stored, value, place))
        if not isinstance(value, dict):
            raise _wrong(place, "an object", value)
        actual = _find_class(value[CLASS], place) if CLASS in value else kind
        if not is_dataclass(actual) or isabstract(actual):
            raise InvalidData(f"{place} does not name its class")
        annotations = _fields(actual)
        if wrong := annotations.keys() ^ (value.keys() - {CLASS}):
            names = ", ".join(sorted(wrong))
            raise InvalidData(f"{place or actual.__name__}: missing or unknown are {names}")
        arguments = {
            name: self.visit(annotation, value[name], _join(place, name))
            for name, annotation in annotations.items()
        }
        instance = actual(**arguments)
        if not isinstance(instance, kind):
            raise _wrong(place, kind.__name__, instance)
        return instance


def _scalar(kind: Any, value: Any, place: str) -> Any:
    if isinstance(value, SCALARS[kind]) and (kind is bool or not isinstance(value, bool)):
        with suppress(OverflowError):  # whole numbers can be too large for a float
            converted = kind(value)
            if kind is not float or math.isfinite(converted):
                return converted
    raise _wrong(place, f"a {'finite ' * (kind is float)}{kind.__name__}", value)


def _without_alias(kind: Any) -> Any:
    """Return what an alias by a `type` statement stands for, such as `NDArray` since NumPy 2.5."""
    alias = get_origin(kind) or kind
    if not hasattr(alias, "__value__"):
        return kind
    return alias.__value__[get_args(kind)] if get_args(kind) else alias.__value__


def _kind_in_json(value: Any) -> Any:
    """Return the annotation of a value that JSON can hold."""
    if isinstance(value, list | tuple):
        return list[Any]
    if isinstance(value, Mapping):
        return dict[str, Any]
    return type(value) if type(value) in SCALARS else str | None


def _check_array(dtype: Any, array: Array, value: Any, place: str) -> None:
    """Raise `InvalidData` unless a value is an array as its annotation says."""
    if not isinstance(value, np.ndarray):
        raise _wrong(place, "an array", value)
    kind = value.dtype.kind
    if dtype is not Any and not np.issubdtype(value.dtype, dtype):
        raise _wrong(place, f"an array of {dtype.__name__}", value)
    strings = kind in "US" or (kind == "O" and all(type(text) is str for text in value.flat))
    if not strings and not (kind in "biuf" and value.dtype.itemsize <= 8):
        raise _wrong(place, "an array of numbers or strings", value)
    rank = 1 if kind in "OU" else array.rank
    if rank not in (None, value.ndim):
        raise _wrong(place, f"an array of rank {rank}", value)
    if kind == "f" and value.size:
        with np.errstate(invalid="ignore"):
            extremes = value.min(), value.max()  # NaN if one number is
        if np.isnan(extremes).any() or not (array.infinite or np.isfinite(extremes).all()):
            raise InvalidData(
                f"{place}: some numbers are NaN{' or infinite' * (not array.infinite)}"
            )


def _restore(stored: NDArray[Any], dtype: str, place: str) -> NDArray[Any]:
    """Return a stored array with the dtype that it had."""
    if dtype == stored.dtype.name:
        return stored
    if stored.dtype == np.uint8 and dtype in TEXTS:
        with suppress(ValueError, RecursionError):
            texts = json.loads(stored.tobytes())
            if isinstance(texts, list) and all(type(text) is str for text in texts):
                return np.array(texts, TEXTS[dtype])
    elif stored.dtype == np.uint8 and stored.ndim and dtype == f"S{stored.shape[-1]}":
        return stored.view(dtype)[..., 0]
    raise InvalidData(f"{place}: the array of {stored.dtype} is not one of {dtype}")


def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of the stored fields of a frozen dataclass, by name."""
    if kind not in _annotations:
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise InvalidConfig(
                f"{kind!r} cannot be stored: make it a frozen dataclass, @dataclass(frozen=True)"
            )
        annotations = get_type_hints(kind, include_extras=True)
        _annotations[kind] = {
            field.name: annotations[field.name]
            for field in fields(kind)
            if field.init and field.metadata.get("stored", True)
        }
    return _annotations[kind]


def _name_of(kind: type[Any]) -> str:
    """Return the name of a class of rcir, or the import path of another one."""
    if kind.__module__ == "__main__":
        raise InvalidConfig(f"{kind!r} cannot be stored: move it to a module that can be imported")
    if not kind.__module__.startswith("rcir."):
        return import_path(kind)
    name: str = getattr(kind, "name", kind.__name__)
    if _registered.get(name) is not kind:
        raise TypeError(f"{kind!r} is not registered")
    return name


def _find_class(name: Any, place: str) -> type[Any]:
    if isinstance(name, str) and name in _registered:
        return _registered[name]
    if isinstance(name, str) and ":" in name:
        return find_class(_join(place, CLASS), name, {})
    raise _wrong(_join(place, CLASS), f"one of {', '.join(sorted(_registered))}", name)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _wrong(place: str, expected: str, value: Any) -> InvalidData:
    given = repr(value)[:80]
    if isinstance(value, np.ndarray):
        given = f"an array of {value.dtype}, rank {value.ndim}"
    return InvalidData(f"{place or 'the value'} is {given}; expected {expected}")
