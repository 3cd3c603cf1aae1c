"""A mistake of the user's, in one line: what is wrong and what would be right."""

from __future__ import annotations


class UserError(Exception):
    """Shown without a traceback; the command line exits with code 2."""
