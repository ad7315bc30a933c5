"""Integrations with training frameworks, one file each: transformers, lightning, accelerate, ray; and loggers.

Each file imports its framework and no other; where that is missing, the import raises MissingExtra with the cure.
"""

__all__: list[str] = []  # the files are public, and importing one of them imports its framework
