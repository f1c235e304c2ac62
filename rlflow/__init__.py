"""rlflow: reinforcement-learning post-training of language models.

Importing the package is cheap: neither torch nor Ray is loaded here.
"""

import importlib as _importlib
from typing import Any

from rlflow.compat import install as _install_compat

__version__ = "0.1.0"

_install_compat()


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        return _importlib.import_module("rlflow.data_proto").DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
