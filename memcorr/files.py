"""What is on disk is believed only after it was checked: every JSON, JSONL and tensor file is read here.

JSON is decoded *into* a type (msgspec), so a wrong type never gets further than the file's name. Tensors
(safetensors) have names, types, shapes and finite values, or are refused. Binary files that are written here carry
a CRC-32 of themselves, the seal (`sealed`); those of other programs need none. Demonstrations (HDF5) are read in
`demos.store`, with the same seal and the same forms.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from .errors import UserError
from .folders import write_text, written_whole

Kind = TypeVar("Kind")
CHECK, SEAL, NO_SUM = "check", b"memcorr-crc32:", b"00000000"  # the seal's name in a file, its beginning, its blank


# Bytes


def refuse(path: Path, problem: BaseException | str, remedy: str) -> NoReturn:
    """One line for a file that is not what it should be."""
    if isinstance(problem, FileNotFoundError):
        raise UserError(f"{path} does not exist; {remedy}") from None
    if isinstance(problem, PermissionError):
        raise UserError(f"{path} may not be read (permission denied); change its permissions") from None
    if isinstance(problem, OSError):
        raise UserError(f"{path} cannot be read ({problem.strerror or problem})") from None
    reason = " ".join(str(problem).split()) or type(problem).__name__
    raise UserError(f"{path} is damaged ({reason[:200]}); {remedy}") from None


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
        return
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
    reason, _, place = str(problem).partition(" - at `$")
    reason = reason.replace("`", "")
    field = place.rstrip("`").lstrip(".")
    return f"{field}: {reason[:1].lower()}{reason[1:]}" if field else reason


def read_json(path: Path, kind: type[Kind], what: str, remedy: str = "restore it") -> Kind:
    """An object of `kind`; `what` says in words what the file should be."""
    try:
        return decoded(content_of(path, remedy), kind)
    except ValueError as problem:
        raise UserError(f"{path} is not {what} ({problem}); {remedy}") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


# Rows of JSON, one per line


def read_rows(path: Path, read: Callable[[bytes], Kind], what: str) -> Iterator[tuple[bytes, Kind]]:
    """(line, row) of a file that rows are appended to, whatever ends its lines; a missing file has none.

    A process killed in the middle of a line leaves half of it at the end: that half is dropped.
    """
    if not path.exists():
        return
    lines = bytes(content_of(path)).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = read(line)
        except ValueError as problem:
            if number == len(lines) and not line.endswith((b"\n", b"\r")):
                return
            reason = " ".join(str(problem).split())[:200]
            raise UserError(f"{path}, line {number} is not {what} ({reason}); repair or remove it") from None
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
    """A safetensors file."""

    arrays: dict[str, NDArray]
    metadata: dict[str, str]
    content: bytearray

    @property
    def digest(self) -> str:
        """First digits of the file's SHA-256."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def read_arrays(path: Path, remedy: str, forms: Mapping[str, Form] | None = None) -> Arrays:
    """The one reader of safetensors. `forms`, if given, are all that the file holds; no value is NaN or infinite."""
    content = content_of(path, remedy)
    try:
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        check_seal(content, 8 + len(header))
        arrays = load(bytes(content))
        metadata = converted(decoded(header, dict[str, Any]).get("__metadata__", {}), dict[str, str])
        if forms is not None:
            check_forms({name: (a.dtype, a.shape) for name, a in arrays.items()}, forms)
        check_finite(arrays)
        return Arrays({name: arrays[name] for name in sorted(arrays)}, metadata, content)
    except (ValueError, KeyError, SafetensorError) as problem:  # a KeyError is of a type that numpy does not have
        refuse(path, problem, remedy)


def write_arrays(path: Path, arrays: Mapping[str, NDArray], metadata: Mapping[str, Any] | None = None) -> None:
    """The one writer of safetensors: whole or not at all, sealed, and the same content gives the same bytes."""
    check_finite(arrays)
    notes = {**{key: str(value) for key, value in (metadata or {}).items()}, CHECK: (SEAL + NO_SUM).decode()}
    content = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, notes)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(notes.items()))  # in one order, whatever the library's
    text = json.dumps(header, separators=(",", ":")).encode()
    with written_whole(path) as temporary:
        temporary.write_bytes(sealed(content[:8] + text.ljust(size) + content[8 + size :]))
