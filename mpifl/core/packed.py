"""Values with arrays and tensors as bytes, and back: without pickle, so that reading them runs no code.

The bytes are a SHA-256 of the rest, the length of a JSON text, the text, and the numbers of all arrays. The
text describes the value; each array is stored once, wherever it occurs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from .devices import CPU

KINDS = "biufc"  # of numbers that arrays may hold
PLAIN = (bool, int, float, str, type(None))


class NotPackable(TypeError):
    """A value holds something other than numbers, texts, arrays, lists and mappings."""


class Damaged(ValueError):
    """Bytes are not those that `packed` returned."""


def packed(value: Any, known: Sequence[torch.Tensor] = ()) -> bytes:
    """Return a value as bytes.

    Args:
        value: plain values, NumPy arrays and numbers, tensors, and lists, tuples, mappings and dataclasses of
            these.
        known: tensors that the reader has; views of all their numbers are not stored again.

    Raises:
        NotPackable: it holds something else.
    """
    writer = _Writer(known)
    text = json.dumps(writer.tree(value)).encode()
    body = b"".join((struct.pack("q", len(text)), text, *writer.blocks))
    return hashlib.sha256(body).digest() + body


def unpacked(
    data: bytes, device: torch.device = CPU, known: Sequence[torch.Tensor] = (), classes: Sequence[type] = ()
) -> Any:
    """Return the value that `packed` was given.

    Args:
        data: the bytes.
        device: device of the tensors that were not in main memory.
        known: as in `packed`.
        classes: the dataclasses in the value.

    Raises:
        Damaged: the bytes are incomplete or changed.
    """
    body = memoryview(data)[32:]
    if len(body) < 8 or hashlib.sha256(body).digest() != bytes(data[:32]):
        raise Damaged("checksum")
    length = struct.unpack_from("q", body)[0]
    tree = json.loads(bytes(body[8 : 8 + length]))
    return _Reader(body[8 + length :], device, known, {cls.__name__: cls for cls in classes}).value(tree)


class _Writer:
    """Turns values into what JSON can hold, and collects their numbers."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self.blocks: list[bytes] = []
        self._end = 0
        self._stored: dict[Any, dict[str, Any]] = {}
        self._known = {_place(tensor): i for i, tensor in enumerate(known)}

    def tree(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return {"number" if isinstance(value, np.generic) else "array": self._block(np.asarray(value))}
        if isinstance(value, (list, tuple)):
            return {"tuple" if isinstance(value, tuple) else "list": [*map(self.tree, value)]}
        if isinstance(value, Mapping):
            return {"mapping": [[self.tree(k), self.tree(v)] for k, v in value.items()]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {"object": [type(value).__name__, self.tree(vars(value))]}
        raise NotPackable(type(value).__name__)

    def _tensor(self, value: torch.Tensor) -> Any:
        if (i := self._known.get(_place(value))) is not None:
            return {"known": i}
        if _place(value) not in self._stored:
            equal = len(value) if value.ndim and value.stride(0) == 0 else 0  # all rows are one row
            numbers = (value[:1] if equal else value).detach().to(CPU)
            if numbers.dtype == torch.bfloat16:  # NumPy has no such numbers
                raise NotPackable(str(numbers.dtype))
            found = {"tensor": self._block(numbers.contiguous().numpy()), "equal": equal}
            self._stored[_place(value)] = {**found, "here": value.device == CPU, "as": len(self._stored)}
        return self._stored[_place(value)]

    def _block(self, value: np.ndarray) -> list[Any]:
        if value.dtype.kind not in KINDS:
            raise NotPackable(value.dtype.name)
        data = np.ascontiguousarray(value).tobytes()
        self.blocks.append(data)
        self._end += len(data)
        return [value.dtype.str, list(value.shape), self._end - len(data)]


class _Reader:
    """Turns what `_Writer` made into values."""

    def __init__(
        self,
        data: memoryview,
        device: torch.device,
        known: Sequence[torch.Tensor],
        classes: Mapping[str, type],
    ) -> None:
        self._data, self._device, self._known, self._classes = data, device, known, classes
        self._read: dict[int, torch.Tensor] = {}

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        kind, content = next(iter(tree.items()))
        if kind == "known":
            return self._known[content]
        if kind == "tensor":
            return self._tensor(tree)
        if kind in ("array", "number"):
            found = self._block(content).copy()
            return found if kind == "array" else found[()]
        if kind == "object":
            return self._classes[content[0]](**self.value(content[1]))
        if kind == "mapping":
            return {self.value(k): self.value(v) for k, v in content}
        return (tuple if kind == "tuple" else list)(map(self.value, content))

    def _tensor(self, tree: Mapping[str, Any]) -> torch.Tensor:
        if tree["as"] not in self._read:
            found = torch.from_numpy(self._block(tree["tensor"]).copy()).clone()  # aligned as PyTorch's are
            found = found if tree["here"] else found.to(self._device)
            self._read[tree["as"]] = found.expand(tree["equal"], *found.shape[1:]) if tree["equal"] else found
        return self._read[tree["as"]]

    def _block(self, about: Sequence[Any]) -> np.ndarray:
        kind, shape, start = about
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._data, np.dtype(kind), count, start).reshape(shape)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that are the same view of the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def digest(*values: Any) -> str:
    """Return a SHA-256 of values of the kinds that `packed` takes, fractions and bytes; 32 digits.

    Raises:
        NotPackable: a value is of another kind.
    """
    sha = hashlib.sha256()
    for piece in _pieces(values):
        sha.update(piece)
    return sha.hexdigest()[:32]


def _pieces(value: Any) -> Iterable[bytes | memoryview]:
    """Yield bytes that differ for values that differ."""
    if isinstance(value, torch.Tensor):
        yield from _pieces(value.detach().to(CPU).contiguous().numpy())
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in KINDS:
            raise NotPackable(array.dtype.name)
        yield f"{array.dtype.str}{np.shape(value)}:".encode()
        yield array.reshape(-1).view(np.uint8).data
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}:".encode()
        for one in value:
            yield from _pieces(one)
    elif isinstance(value, Mapping):
        yield f"{{{len(value)}:".encode()
        for name, one in value.items():
            yield from _pieces(name)
            yield from _pieces(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"<{type(value).__name__}".encode()
        yield from _pieces(vars(value))
    elif type(value) in (*PLAIN, Fraction):
        text = repr(value).encode()
        yield f"{type(value).__name__}{len(text)}:".encode() + text
    elif isinstance(value, bytes):
        yield f"bytes{len(value)}:".encode() + value
    else:
        raise NotPackable(type(value).__name__)
