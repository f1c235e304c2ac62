"""Gradients that are NaN or infinite: what an update does then, what is kept of it, and how it is looked into.

guard.py      skip or stop, and how many in a row
dump.py       the mini-batch of such a step on disk
replay.py     the same step again, until a row, a module and a parameter are named
"""

from __future__ import annotations
