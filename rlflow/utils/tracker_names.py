"""Names of `trainer.logger`, and which package and extra each of them needs.

Light on purpose: the checks ask it before Ray starts, and nothing is imported to answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rlflow.utils.import_utils import is_installed

# name -> packages that must be importable; the extra of pyproject.toml that brings them has the tracker's name.
TRACKERS: dict[str, tuple[str, ...]] = {
    "console": (),
    "file": (),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
    "clearml": ("clearml",),
}
OLD_NAMES = {"tracking": "wandb"}
NOT_IN_THIS_VERSION = ("rl_insight", "vemlp_wandb")


def tracker_names(value: str | Iterable[str] | None) -> list[str]:
    """`trainer.logger` as a list without repetitions; the old name `tracking` is wandb."""
    names = [value] if isinstance(value, str) else [str(name) for name in value or ()]
    return list(dict.fromkeys(OLD_NAMES.get(name, name) for name in names))


def tracker_problem(name: str) -> str | None:
    """Why this tracker cannot be used, and what to try; None when it can."""
    if name in NOT_IN_THIS_VERSION:
        return f"trainer.logger names {name}, which is not in this version.\n    try:    trainer.logger=[console,file]"
    if name not in TRACKERS:
        close = difflib.get_close_matches(name, TRACKERS, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        return f"trainer.logger names {name}, which is no tracker.\n    try:    {guess}(there is {', '.join(TRACKERS)})"
    missing = missing_packages(name)
    if missing:
        return (
            f"trainer.logger names {name}, but its package is not installed ({', '.join(missing)}).\n"
            f"    try:    pip install 'rlflow[{name}]', or trainer.logger without {name}"
        )
    return None


def missing_packages(name: str) -> list[str]:
    """The packages a known tracker needs and this environment has not."""
    return [package for package in TRACKERS[name] if not is_installed(package)]
