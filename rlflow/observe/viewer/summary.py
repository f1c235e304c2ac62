"""What the overview says in words and numbers: facts of the run, headline numbers, prompts by state, events of note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.observe import glossary
from rlflow.observe.events import Journal
from rlflow.observe.records import RunFolder

Metrics = dict[int, dict[str, float | None]]

# (title, metric, unit): shown when the run has the metric; the newest value, and where it came from.
HEADLINES = (
    ("Reward", "critic/score/mean", ""),
    ("Response length", "response_length/mean", "tokens"),
    ("Entropy", "actor/entropy", ""),
    ("KL to the old policy", "actor/ppo_kl", ""),
    ("Gradient norm", "actor/grad_norm", ""),
    ("Trainer against rollout", "training/rollout_log_probs_diff/mean", "log-prob"),
    ("Throughput", "perf/throughput", "tokens/s/device"),
    ("Time of a step", "timing_s/step", "s"),
)
NOTABLE = (
    *("run_started", "resumed", "saved", "fault", "restart", "dropped", "validated", "run_ended"),
    *("replica_lost", "replica_serving", "replica_gone"),
)
BAD = ("fault", "dropped", "replica_lost", "replica_gone")
NOTABLE_LIMIT = 200


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis; `band` names the metrics of lower and upper edge."""

    title: str
    series: tuple[tuple[str, str], ...]
    band: tuple[str, str] | None = None
    help: str = ""


CHARTS = (
    Chart(
        "Reward",
        (("critic/score/mean", "mean"),),
        ("critic/score/min", "critic/score/max"),
        "Scores of the step's trajectories; the band goes from the lowest to the highest.",
    ),
    Chart(
        "Response length",
        (("response_length/mean", "mean"),),
        ("response_length/min", "response_length/max"),
        "Tokens of a response; the band goes from the shortest to the longest.",
    ),
    Chart(
        "KL",
        (
            ("actor/ppo_kl", "old policy"),
            ("actor/kl_loss", "reference, as loss"),
            ("actor/reward_kl_penalty", "reference, in reward"),
        ),
        help="How far the actor moved: from the policy that sampled, and from the reference.",
    ),
    Chart("Entropy", (("actor/entropy", "mean"),), help="Entropy of the actor's next-token distribution, in nats."),
    Chart("Gradient norm", (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic")), help="Before clipping."),
    Chart(
        "Trainer against rollout",
        (("training/rollout_log_probs_diff/mean", "mean"), ("training/rollout_log_probs_diff/max", "max")),
        help="Difference of log-probs of the sampled tokens between the trainer and the rollout engine.",
    ),
)


def headline_numbers(metrics: Metrics) -> list[dict[str, Any]]:
    """Newest value of each headline metric, with the change since its first value."""
    found = []
    names = [*HEADLINES, *((_short(name), name, "") for name in validation_names(metrics)[:2])]
    for title, name, unit in names:
        values = [(step, row[name]) for step, row in metrics.items() if row.get(name) is not None]
        if values:
            (first_step, first), (step, value) = values[0], values[-1]
            found.append(
                {"title": title, "metric": name, "unit": unit, "step": step, "value": value, "help": explain(name)}
                | {"first_step": first_step, "first": first, "several": len(values) > 1}
            )
    return found


def explain(name: str) -> str:
    """What the glossary says about a metric, as plain text; "" for one that is not ours."""
    entry = glossary.find(name)
    if entry is None:
        return ""
    unit = f" ({entry.unit})" if entry.unit else ""
    alarming = f". Alarming: {entry.alarming}" if entry.alarming else ""
    return f"{entry.meaning}{unit}{alarming}".replace("`", "")


def charts(metrics: Metrics) -> list[dict[str, Any]]:
    """The charts for which the run has numbers; validation in one more."""
    known = {name for row in metrics.values() for name, value in row.items() if value is not None}
    found = []
    for chart in CHARTS:
        series = [[name, label] for name, label in chart.series if name in known]
        if series:
            band = list(chart.band) if chart.band and set(chart.band) <= known else None
            found.append({"title": chart.title, "series": series, "band": band, "help": chart.help})
    core = validation_names(metrics)[:6]
    if core:
        series = [[name, _short(name)] for name in core]
        found.insert(1, {"title": "Validation", "series": series, "band": None, "help": "On held-out prompts."})
    return found


def validation_names(metrics: Metrics) -> list[str]:
    """Names of the run's main validation metrics, sorted."""
    return sorted({name for row in metrics.values() for name in row if name.startswith("val-core/")})


def _short(name: str) -> str:
    return name.removeprefix("val-core/")


def run_facts(run: RunFolder, journal: Journal, metrics: Metrics) -> list[tuple[str, Any, str]]:
    """(name, value, kind) of what identifies the run; kind is "text", "time" or "duration"."""
    facts: list[tuple[str, Any, str]] = [("Folder", str(run.path.resolve()), "text")]
    if journal.starts:
        first, last = journal.starts[0], journal.starts[-1]
        facts += [("Run", last.run_id, "text"), ("Started", first.time, "time")]
        trained = max((e.step for e in journal.of("trained", "weights", "stage")), default=0)
        facts.append(("Steps", f"{min(trained, last.total_steps or trained)} of {last.total_steps}", "text"))
        facts.append(("Training processes", last.world_size, "text"))
        resumes = [str(start.resumed_from) for start in journal.starts if start.resumed_from]
        if resumes:
            facts.append(("Resumed", f"after step {', '.join(resumes)}", "text"))
        facts.append(("rlflow", last.rlflow, "text"))
    if journal.events:
        facts.insert(3 if journal.starts else 1, ("Last sign of life", journal.events[-1].time, "time"))
        facts.insert(
            4 if journal.starts else 2,
            ("Duration", journal.events[-1].time - journal.events[0].time, "duration"),
        )
    best = run.best_checkpoint()
    if best:
        value = best.get("value")
        shown = f"{value:.4g}" if isinstance(value, float) else value
        facts.append(("Best checkpoint", f"step {best.get('step')}: {best.get('metric')} = {shown}", "text"))
    if journal.damaged:
        facts.append(("Unreadable journal lines", journal.damaged, "text"))
    return facts


def status(journal: Journal, writer_lives: bool | None) -> tuple[str, str]:
    """(word, sentence) about where the run stands; `writer_lives` as `RunFolder.writer_lives`."""
    end = journal.end
    if end is None and writer_lives:
        return "running", "The run was still going when this was made."
    if end is None and writer_lives is False:
        return "killed", "The run was killed: its journal has no end, and its process is gone."
    if end is None:
        return "no end yet", "The journal has no end: the run was still going when this was made, or it was killed."
    code, reason = end.data.get("exit_code"), end.data.get("reason") or ""
    if code == 0:
        return "done", f"The run ended as planned ({reason})." if reason not in ("", "done") else "The run is complete."
    return "failed", f"The run ended with exit code {code}: {reason}"


def notable(journal: Journal) -> list[dict[str, Any]]:
    """The newest events of note, oldest first."""
    rows = []
    for event in journal.of(*NOTABLE)[-NOTABLE_LIMIT:]:
        kind = "bad" if event.event in BAD or event.data.get("exit_code") else ""
        rows.append(
            {"time": event.time, "step": event.step, "event": event.event, "kind": kind, "text": _say(event.data)}
        )
    return rows


def _say(data: dict[str, Any]) -> str:
    parts = []
    for name, value in data.items():
        if name == "stages" or value is None:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} = {v:.4g}" if isinstance(v, float) else f"{k} = {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(str(item) for item in value[:12]) + (", ..." if len(value) > 12 else "")
        parts.append(f"{name.replace('_', ' ')}: {value}")
    return "; ".join(parts)


def config_rows(config_text: str | None, changes: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Every key of the configuration with its value, in the file's order; `default` where `changes` has one.

    Args:
        config_text: the run's config.yaml.
        changes: key -> default value, for the keys that differ from the defaults; None when that is not known.
    """
    if not config_text:
        return []
    import yaml

    try:
        tree = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return []
    rows = []
    for name, value in flatten(tree):
        row: dict[str, Any] = {"key": name, "value": text_of(value)}
        if changes is not None and name in changes:
            row["default"] = text_of(changes[name])
        rows.append(row)
    return rows


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings as dotted names; lists and empty mappings are leaves."""
    if not isinstance(tree, dict):
        return []
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        leaves += flatten(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return leaves


def text_of(value: Any) -> str:
    """A configuration value as YAML shows it on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(text_of(item) for item in value)}]"
    return str(value)
