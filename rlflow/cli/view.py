"""`rlflow view DIR`: a run as static web pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.observe.records import RunFolder


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "view",
        help="a run as static web pages that open from disk",
        description="Writes one folder of web pages about a run: curves, stages, prompts, and every recorded "
        "trajectory token by token. It needs no server and no network. Run it again to see how a run went on.",
        epilog="example: rlflow view checkpoints/my_project/my_run --open",
    )
    parser.add_argument("folder", metavar="DIR", help="the run folder (trainer.default_local_dir)")
    parser.add_argument("--out", metavar="DIR2", type=Path, help="where the pages go (default: DIR/view)")
    parser.add_argument(
        "--steps", metavar="A:B", type=_steps, help="only the trajectories of these steps, both included"
    )
    parser.add_argument("--open", action="store_true", help="open the pages in the browser")


def run(args: argparse.Namespace) -> int:
    """Write the pages and say where."""
    from rlflow.observe.records import RunFolder
    from rlflow.observe.viewer import write_view

    folder = RunFolder(args.folder)
    out = args.out or folder.path / "view"
    report = write_view(folder, out, changes=config_changes(folder), steps=args.steps, on_file=_progress())
    size = report.bytes / 1e6
    sys.stdout.write(f"{report.index}: {report.trajectories} trajectories, {report.files} files, {size:.1f} MB\n")
    if args.open:
        import webbrowser

        if not webbrowser.open(report.index.resolve().as_uri()):
            sys.stderr.write("rlflow view: no browser found to open it with\n")
    return 0


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 0
        high = (int(last) if last else sys.maxsize - 1) if colon else low
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; try 10:20, 10: or 10") from error
    return range(low, high + 1)


def _progress() -> Any:
    """A counter on stderr where a person watches; nothing in a pipe."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\rreading {done}/{total}" + ("\r\033[K" if done == total else ""))
        sys.stderr.flush()

    return show


def config_changes(folder: RunFolder) -> dict[str, Any] | None:
    """Keys of the run's configuration that differ from the defaults -> the default; None when they cannot be compared.

    Compared only with the defaults of the very version that made the run.
    """
    import rlflow

    starts = folder.journal().starts
    text = folder.config_text()
    if not text or not starts or starts[-1].rlflow != rlflow.__version__:
        return None
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlflow.config.overrides import compose_config
    from rlflow.observe.viewer.summary import flatten
    from rlflow.utils.errors import ConfigError

    try:
        values = dict(flatten(yaml.safe_load(text)))
        config = compose_config()
    except (yaml.YAMLError, ConfigError):
        return None
    defaults = dict(flatten(OmegaConf.to_container(config, resolve=False)))
    refers = {name for name, value in defaults.items() if isinstance(value, str) and "${" in value}
    # A default that refers to other keys is what it comes to with the values that the run gave those.
    for name in values.keys() & defaults.keys() - refers:
        OmegaConf.update(config, name, values[name], force_add=True)
    for name in refers & values.keys():
        try:
            defaults[name] = OmegaConf.select(config, name)
        except OmegaConfBaseException:
            defaults[name] = values[name]
    changed = {name: defaults.get(name, "not set") for name in values if values[name] != defaults.get(name, "not set")}
    return {name: "required" if default == "???" else default for name, default in changed.items()}
