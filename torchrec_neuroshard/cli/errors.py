"""Errors that a command reports without a traceback."""

from __future__ import annotations


class CliError(ValueError):
    """Bad input; the message names the file or option, the field and the remedy."""
