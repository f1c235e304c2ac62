"""Policy losses, one file each, and the losses of critic and entropy.

Every file of this folder is imported, and registers its loss by that: a new loss is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
