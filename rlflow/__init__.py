"""rlflow: reinforcement-learning post-training of language models.

Importing the package is cheap: neither torch nor Ray is loaded here.
"""

__version__ = "0.1.0"
