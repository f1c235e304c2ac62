"""rlflow: reinforcement-learning post-training of language models.

Importing the package is cheap: neither torch nor Ray is loaded here.
"""

from typing import Any

from rlflow.compat import install as _install_compat
from rlflow.compat import missing as _missing

__version__ = "0.1.0"

_install_compat()


def __getattr__(name: str) -> Any:
    raise _missing(__name__, name)
