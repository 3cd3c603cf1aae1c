"""A mistake of the user's, in one line: what is wrong and what would be right."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class UserError(Exception):
    """Shown without a traceback; the command line exits with code 2."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what only `pip install 'memcorr[EXTRA]'` brings."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is missing: pip install 'memcorr[{extra}]'") from None


def imported(text: str, wanted: str, said: str = "") -> Any:
    """The object that `MODULE:NAME` names; its module may lie in the working directory. `wanted` says what would be
    right, `said` stands before it."""
    module, _, name = text.partition(":")
    said = said or text
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise UserError(f"{said} names nothing: give {wanted}")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as problem:
        raise UserError(f"{said}: {problem}") from None
    except AttributeError:
        raise UserError(f"{said}: {module} has no {name}") from None
    finally:
        sys.path.remove(os.getcwd())
    return found
