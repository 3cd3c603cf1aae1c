"""What is on disk is believed only after it was checked: every JSON, JSONL and tensor file is read here.

JSON is decoded *into* a type (msgspec), so a wrong type never gets further than the file's name. Tensors
(safetensors) have names, types, shapes and finite values, or are refused. Files carry a CRC-32 of themselves:
binary ones a seal (`sealed`), JSON objects and rows a field `check`. Files older than that have none and are
read all the same. Demonstrations (HDF5) are read in `demos.store`, with the same seal and the same forms.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .runs import write_text, written_whole

Kind = TypeVar("Kind")
CHECK = "check"
SECONDS = re.compile(rb'(?<="seconds": )[^,}]*')
SEAL, NO_SUM = b"memcorr-crc32:", b"00000000"
DTYPES = {  # of safetensors, as numpy calls them; others are never written here
    **{"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32"},
    **{"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
}


# Bytes


def refuse(path: Path, problem: BaseException | str, remedy: str) -> NoReturn:
    """One line for a file that is not what it should be."""
    if isinstance(problem, FileNotFoundError):
        raise UserError(f"{path} does not exist; {remedy}") from None
    if isinstance(problem, PermissionError):
        raise UserError(f"{path} may not be read (permission denied); change its permissions") from None
    if isinstance(problem, OSError):
        raise UserError(f"{path} cannot be read ({problem.strerror or problem})") from None
    told = " ".join(str(problem).split()) or type(problem).__name__
    raise UserError(f"{path} is damaged ({told[:200]}); {remedy}") from None


def content_of(path: Path, remedy: str = "restore it") -> bytearray:
    """The whole file; arrays may be views of it."""
    try:
        with open(path, "rb") as f:
            content = bytearray(os.fstat(f.fileno()).st_size)
            if f.readinto(content) != len(content) or f.read(1):
                raise ValueError("its size changed while it was read")
            return content
    except (OSError, ValueError, MemoryError) as problem:
        refuse(path, problem, remedy)


def digest_of(path: Path, remedy: str = "restore it") -> str:
    """SHA-256 of the file: what a row or a cache names its sources by."""
    try:
        with open(path, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as problem:
        refuse(path, problem, remedy)


def sealed(content: bytes) -> bytes:
    """`content`, which holds an empty seal (`SEAL + NO_SUM`), with the CRC-32 of everything in it."""
    at = content.index(SEAL + NO_SUM) + len(SEAL)
    return content[:at] + f"{zlib.crc32(content):08x}".encode() + content[at + len(NO_SUM) :]


def check_seal(content: bytes | bytearray, end: int | None = None) -> None:
    """Raises a ValueError if the content has a seal (before `end`) that is not its own."""
    at = content.find(SEAL, 0, end)
    if at < 0:
        return  # older than seals
    at += len(SEAL)
    view = memoryview(content)
    total = zlib.crc32(view[at + len(NO_SUM) :], zlib.crc32(NO_SUM, zlib.crc32(view[:at])))
    if bytes(view[at : at + len(NO_SUM)]) != f"{total:08x}".encode():
        raise ValueError("it does not match its checksum")


# JSON


def decoded(content: bytes | bytearray, kind: type[Kind]) -> Kind:
    """JSON as a value of `kind`, or a ValueError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise ValueError(_words(problem)) from None


def converted(content: Any, kind: type[Kind]) -> Kind:
    """What `decoded` does, from values instead of text."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.MsgspecError as problem:
        raise ValueError(_words(problem)) from None


def _words(problem: BaseException) -> str:
    """msgspec's message with the field first: "pairs: expected int, got str"."""
    told, _, place = str(problem).partition(" - at `$")
    told = told.replace("`", "")
    field = place.rstrip("`").lstrip(".")
    return f"{field}: {told[:1].lower()}{told[1:]}" if field else told


def read_json(path: Path, kind: type[Kind], what: str, remedy: str = "restore it") -> Kind:
    """An object of `kind`; `what` says in words what the file should be."""
    content = content_of(path, remedy)
    try:
        raw = decoded(content, object)
    except ValueError as problem:
        raise UserError(f"{path} is not valid JSON ({problem}); {remedy}") from None
    try:
        if isinstance(raw, dict) and raw.pop(CHECK, None) not in (None, _check(raw)):
            raise ValueError(f'it does not match its "{CHECK}"; if the change is meant, take that line out')
        return converted(raw, kind)
    except ValueError as problem:
        raise UserError(f"{path} is not {what} ({problem}); {remedy}") from None


def write_json(path: Path, content: dict[str, Any], check: bool = True) -> None:
    """With a checksum, unless it is for people alone."""
    plain = {key: value for key, value in content.items() if key != CHECK}
    write_text(path, json.dumps(plain | ({CHECK: _check(plain)} if check else {}), indent=2) + "\n")


def _check(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


# Rows of JSON, one per line


def checked_row(row: dict[str, Any]) -> str:
    """One line with its checksum at the end. `seconds`, which differ between two equal runs, are not in it."""
    text = json.dumps(row, allow_nan=False)[:-1]
    return f'{text}, "{CHECK}": "{_row_sum(text.encode())}"}}\n'


def check_row(line: bytes) -> None:
    """Raises a ValueError if the line has a checksum that is not its own."""
    text, mark, given = line.rstrip().rpartition(b', "check": "')
    if mark and given != f'{_row_sum(text)}"}}'.encode():
        raise ValueError(f'it does not match its "{CHECK}"')


def _row_sum(text: bytes) -> str:
    return f"{zlib.crc32(SECONDS.sub(b'', text)):08x}"


def read_rows(path: Path, read: Callable[[bytes], Kind], what: str) -> Iterator[tuple[bytes, Kind]]:
    """(line, row) of a file that rows are appended to, whatever ends its lines; a missing file has none.

    A process killed in the middle of a line leaves half of it at the end: that half is dropped.
    """
    if not path.exists():
        return
    lines = bytes(content_of(path)).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            check_row(line)
            row = read(line)
        except ValueError as problem:
            if number == len(lines) and not line.endswith((b"\n", b"\r")):
                return
            told = " ".join(str(problem).split())[:200]
            raise UserError(f"{path}, line {number} is not {what} ({told}); repair or remove it") from None
        yield line, row


@contextmanager
def appending(path: Path) -> Iterator[Callable[[str], None]]:
    """Writes lines at the end of the file, each at once; a refused one names the file."""
    with open(path, "ab", buffering=0) as file:

        def write(line: str) -> None:
            try:
                rest = line.encode()
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as problem:
                why = f"could not be written ({problem.strerror or problem}); is the disk full?"
                raise OSError(problem.errno, why, str(path)) from problem

        yield write


def forget_later_rows(path: Path, counter: str, last: int) -> None:
    """Drops the rows whose `counter` is beyond `last`: a run that was killed later writes them again."""
    rows = list(read_rows(path, lambda line: decoded(line, dict[str, Any]), "a row of metrics"))
    if path.exists():
        kept = [line.decode().strip() for line, row in rows if row.get(counter, last) <= last]
        write_text(path, "".join(f"{line}\n" for line in kept))


# Arrays


@dataclass(frozen=True)
class Form:
    """What an array has to look like."""

    dtype: str  # as numpy calls it, or "float" for any floating type
    shape: tuple[int | str, ...]  # a letter is a size that the arrays of a file share

    def fits(self, dtype: np.dtype, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
        right = np.issubdtype(dtype, np.floating) if self.dtype == "float" else dtype == self.dtype
        return (
            right
            and len(shape) == len(self.shape)
            and all(
                found == (sizes.setdefault(wanted, found) if isinstance(wanted, str) else wanted)
                for found, wanted in zip(shape, self.shape, strict=True)
            )
        )

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


def check_forms(
    found: Mapping[str, tuple[np.dtype, tuple[int, ...]]], forms: Mapping[str, Form], optional: tuple[str, ...] = ()
) -> dict[str, int]:
    """The sizes behind the letters, if every array is there as it should be and no other; else a ValueError."""
    sizes: dict[str, int] = {}
    for name, form in forms.items():
        if name not in found:
            if name in optional:
                continue
            raise ValueError(f"{name} is missing")
        if not form.fits(*found[name], sizes):
            dtype, shape = found[name]
            raise ValueError(f"{name} is {Form(str(dtype), shape)}, not {form}")
    if unknown := sorted(set(found) - set(forms)):
        raise ValueError(f"{unknown[0]} does not belong there")
    return sizes


def check_finite(arrays: Mapping[str, NDArray]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            # What is not finite makes a sum that is not; only then is it worth looking at each value.
            if array.dtype.kind == "f" and not np.isfinite(array.sum()) and not np.isfinite(array).all():
                raise ValueError(f"{name} holds values that are not finite")


@dataclass(frozen=True)
class Arrays:
    """A safetensors file: arrays are views of its bytes."""

    arrays: dict[str, NDArray]
    metadata: dict[str, str]
    content: bytearray

    @property
    def digest(self) -> str:
        """First digits of the file's SHA-256."""
        return hashlib.sha256(self.content).hexdigest()[:12]


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_arrays(path: Path, remedy: str, forms: Mapping[str, Form] | None = None) -> Arrays:
    """The one reader of safetensors. `forms`, if given, are all that the file holds; no value is NaN or infinite."""
    content = content_of(path, remedy)
    try:
        found = _parse(content)
        if forms is not None:
            check_forms({name: (a.dtype, a.shape) for name, a in found.arrays.items()}, forms)
        check_finite(found.arrays)
        return found
    except ValueError as problem:
        refuse(path, problem, remedy)


def _parse(content: bytearray) -> Arrays:
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise ValueError("it is shorter than it says")
    check_seal(content, 8 + size)
    header = decoded(content[8 : 8 + size], dict[str, Any])
    metadata = converted(header.pop("__metadata__", {}), dict[str, str])
    entries = {name: converted(entry, Entry) for name, entry in header.items()}
    arrays, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} is {entry.dtype} {list(entry.shape)}")
        dtype, count = np.dtype(DTYPES[entry.dtype]), math.prod(entry.shape)
        if entry.data_offsets != (end, end + count * dtype.itemsize) or entry.data_offsets[1] > len(content) - 8 - size:
            raise ValueError(f"the values of {name} are not where they should be")
        array = np.frombuffer(content, dtype, count, 8 + size + end).reshape(entry.shape)
        if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError(f"{name} holds values that are neither true nor false")
        arrays[name], end = array, entry.data_offsets[1]
    if 8 + size + end != len(content):
        raise ValueError("it is longer than it says")
    return Arrays({name: arrays[name] for name in sorted(arrays)}, metadata, content)


def write_arrays(path: Path, arrays: Mapping[str, NDArray], metadata: Mapping[str, Any] | None = None) -> None:
    """The one writer of safetensors: whole or not at all, sealed, and the same content gives the same bytes."""
    from safetensors.numpy import save

    check_finite(arrays)
    told = {**{key: str(value) for key, value in (metadata or {}).items()}, CHECK: (SEAL + NO_SUM).decode()}
    content = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, told)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(told.items()))  # in one order, whatever the library's
    text = json.dumps(header, separators=(",", ":")).encode()
    with written_whole(path) as temporary:
        temporary.write_bytes(sealed(content[:8] + text.ljust(size) + content[8 + size :]))
