"""The consistency modes, one file each. Importing this package registers every mode in the folder: there is no list."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
