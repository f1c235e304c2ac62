"""rlflow: reinforcement-learning post-training of language models.

Importing the package is cheap: neither torch nor Ray is loaded here.
"""

from rlflow.compat import install as _install_compat

__version__ = "0.1.0"

_install_compat()
