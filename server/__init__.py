"""The door, the words and the engine."""

__version__ = "0.1.0"
