"""The arguments of a job: which tree, which overrides; flags and options of Hydra work, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.config.old_keys import renamed
from rlflow.config.overrides import CONFIG_NAME

# Trees of trainers that are not in this version.
ASYNC_TREES = ("fully_async_ppo_trainer", "one_step_off_ppo_trainer")
_NAMES = {"--config-name": "name", "-cn": "name", "--config-path": "folder", "-cp": "folder"}
_NAMES |= {"--config-dir": "folder", "-cd": "folder"}
_REFUSED = {
    "--multirun": "one command is one run: start several",
    "-m": "one command is one run: start several",
    "--package": "the whole tree is shown: rlflow config show --node NODE",
    "-p": "the whole tree is shown: rlflow config show --node NODE",
    "--info": "rlflow config explain KEY, or rlflow doctor",
    "-i": "rlflow config explain KEY, or rlflow doctor",
    "--experimental-rerun": "start the run again with its command: resume_mode=auto goes on where it stopped",
    "--resolve": "rlflow config show key=value ...",
    "--run": "leave it out: a run is what is started",
    "-r": "leave it out: a run is what is started",
}
_HYDRA = {
    "hydra.run.dir": "trainer.default_local_dir is the run folder, and the working directory stays",
    "hydra.output_subdir": "the run folder has config.yaml",
    "hydra.job.chdir": "the working directory stays",
}


@dataclass
class CommandLine:
    """A command line, read.

    Attributes:
        overrides: those of values and groups, with keys of this tree.
        config: name of a tree of the package, or the path of a YAML file of the user's.
        notices: what was rewritten, and options of Hydra without effect.
        problems: flags that cannot work here (with what to do instead), and a config file that is not there.
    """

    overrides: list[str] = field(default_factory=list)
    config: str = CONFIG_NAME
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_command_line(arguments: Sequence[str], config_name: str = CONFIG_NAME) -> CommandLine:
    """Take flags and options of Hydra out, and old keys to their places."""
    chosen: dict[str, str] = {}
    found = CommandLine(config=config_name)
    rest, problems = iter(arguments), found.problems
    for text in rest:
        flag, sign, value = text.partition("=")
        if flag in _NAMES:
            chosen[_NAMES[flag]] = value if sign else next(rest, "")
        elif flag in _REFUSED:
            problems.append(f"{flag} is not an option here.\n    set in: command line\n    try:    {_REFUSED[flag]}")
        elif flag.lstrip("+~").startswith("hydra."):
            key = flag.lstrip("+~")
            why = next((why for name, why in _HYDRA.items() if key.startswith(name)), "no launcher of Hydra runs here")
            found.notices.append(f"{key} has no effect: {why}")
        else:
            found.overrides.append(text)
    if chosen:
        found.config = _config_file(chosen.get("name") or config_name, chosen.get("folder"), problems)
    found.overrides, moved = renamed(found.overrides)
    found.notices += moved
    return found


def _config_file(name: str, folder: str | None, problems: list[str]) -> str:
    """The tree that --config-name and --config-path choose: one of the package, or a file of the user's."""
    name = name.removesuffix(".yaml")
    if folder is None or folder in ("config", "pkg://rlflow.config", "pkg://verl.trainer.config"):
        if (Path(__file__).parent / f"{name}.yaml").is_file():
            return name
        if name in ASYNC_TREES:
            return name  # read as the synchronous one, with a problem that says so
        if folder is None or folder.startswith("pkg://"):
            names = sorted(path.stem for path in Path(__file__).parent.glob("*_trainer.yaml"))
            problems.append(
                f"--config-name={name}: the package has no such tree.\n    set in: command line\n"
                f"    try:    one of {', '.join(names)}, or --config-path=FOLDER for a file of your own"
            )
            return CONFIG_NAME
    file = Path(folder).expanduser().resolve() / f"{name}.yaml"
    if not file.is_file():
        problems.append(
            f"--config-path={folder} --config-name={name}: there is no {file}.\n    set in: command line\n"
            "    try:    the folder that holds the file, from the working directory"
        )
        return CONFIG_NAME  # to find what else is wrong
    return str(file)
