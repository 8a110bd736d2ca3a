"""Errors of the model room that a user can act on."""

from __future__ import annotations


class ModelError(ValueError):
    """A checkpoint that cannot be served; the one-line message names the file, the value and the way out."""
