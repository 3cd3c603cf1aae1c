"""A mistake of the user's, in one line: what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Shown without a traceback; the command line exits with code 2."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what only `pip install 'memcorr[EXTRA]'` brings."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is missing: pip install 'memcorr[{extra}]'") from None
