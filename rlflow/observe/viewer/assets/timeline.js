"use strict";
// Steps as bars of stages; one step with its stages and sessions on one axis.
RLFLOW.timeline = (() => {
  const { el, seconds, number, clock, table, folded, scroller, links, plain } = RLFLOW;
  const PAGE = 50;
  const KNOWN = ["gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "save_checkpoint", "testing"];
  const stageClass = (stage) => `stage-${KNOWN.includes(stage) ? KNOWN.indexOf(stage) : KNOWN.length}`;

  /** Stages by step: [{step, start, end, spans}], newest step first. */
  function bySteps(run) {
    const found = new Map();
    for (const [step, stage, start, end, rows, version] of run.stages) {
      if (!found.has(step)) found.set(step, { step, start, end, spans: [] });
      const entry = found.get(step);
      entry.spans.push({ stage, start, end, rows, version });
      entry.start = Math.min(entry.start, start);
      entry.end = Math.max(entry.end, end);
    }
    return [...found.values()].sort((a, b) => b.step - a.step);
  }

  function bar(span, from, length) {
    return el("span", { class: `bar ${stageClass(span.stage)}`, title: `${span.stage} ${seconds(span.end - span.start)}`,
      style: { left: `${((span.start - from) / length * 100).toFixed(3)}%`, width: `${Math.max(0.15, (span.end - span.start) / length * 100).toFixed(3)}%` } });
  }

  function legend(stages) {
    return el("ul", { class: "stage-legend", "aria-label": "Stages" }, stages.map((stage) => el("li", {}, el("span", { class: `key ${stageClass(stage)}` }), plain(stage))));
  }

  const order = (stages) => [...stages].sort((a, b) => (KNOWN.indexOf(a) + 99) % 99 - (KNOWN.indexOf(b) + 99) % 99);

  /** The page of all steps. */
  function steps(run, body, page) {
    const entries = bySteps(run);
    const counts = new Map();
    for (const [step, partition, issued, running, finished, trained, dropped] of run.accounting) {
      if (partition === "train") counts.set(step, { issued, running, finished, trained, dropped });
    }
    for (const step of counts.keys()) if (!entries.some((entry) => entry.step === step)) entries.unshift({ step, start: 0, end: 0, spans: [] });
    entries.sort((a, b) => b.step - a.step);
    if (!entries.length) { body.replaceChildren(el("p", {}, "No step has begun yet.")); return; }
    const shown = entries.slice((page - 1) * PAGE, page * PAGE);
    const longest = Math.max(...shown.map((entry) => entry.end - entry.start), 1e-9);
    const names = order(new Set(shown.flatMap((entry) => entry.spans.map((span) => span.stage))));
    const rows = shown.map((entry) => {
      const count = counts.get(entry.step);
      const prompts = count ? `${count.trained} of ${count.issued} trained${count.dropped ? `, ${count.dropped} dropped` : ""}${count.running ? `, ${count.running} running` : ""}` : "";
      return el("tr", {}, el("th", { scope: "row", class: "num" }, el("a", { href: links.step(entry.step), class: "row-link" }, String(entry.step))),
        el("td", { class: "bars" }, el("div", { class: "lane" }, entry.spans.map((span) => bar(span, entry.start, longest)))),
        el("td", { class: "num" }, entry.spans.length ? seconds(entry.end - entry.start) : "–"),
        el("td", { class: count && count.dropped ? "bad prompts" : "prompts" }, prompts));
    });
    const durations = () => shown.map((entry) => [String(entry.step), ...names.map((name) => {
      const spans = entry.spans.filter((span) => span.stage === name);
      return spans.length ? seconds(spans.reduce((sum, span) => sum + span.end - span.start, 0)) : "–";
    })]);
    body.replaceChildren(
      el("p", { class: "hint" }, "Each bar is a step from its first stage to its last; all have one scale. Open a step to see its sessions."),
      legend(names),
      table([["step", "num"], ["stages", "bars"], ["took", "num"], ["prompts", "prompts"]], rows, { class: "plain timeline" }),
      pager(page, Math.ceil(entries.length / PAGE), (to) => `#/steps?page=${to}`),
      folded("Seconds of each stage", () => scroller("Seconds of each stage", table([["step", "num"], ...names.map((name) => [plain(name), "num"])], durations()))));
  }

  /** Links to other pages of a long list; nothing when there is one. */
  function pager(page, pages, link) {
    if (pages < 2) return null;
    return el("nav", { class: "pager", "aria-label": "Pages of the list" },
      page > 1 ? el("a", { href: link(page - 1), rel: "prev" }, "← Previous") : el("span", { class: "off" }, "← Previous"),
      el("span", {}, `page ${page} of ${pages}`),
      page < pages ? el("a", { href: link(page + 1), rel: "next" }, "Next →") : el("span", { class: "off" }, "Next →"));
  }

  /** The page of one step: `data` is its files of trajectories, training and validation. */
  function step(run, data, number_, body) {
    const entry = bySteps(run).find((item) => item.step === number_);
    const rows = data.flatMap((file) => file.trajectories).filter((row) => row.started !== null && row.ended !== null);
    const spans = entry ? entry.spans : [];
    const parts = [];
    const accounts = run.accounting.filter((row) => row[0] === number_);
    if (accounts.length) {
      parts.push(el("h2", {}, "Prompts"), table([["part", ""], ["issued", "num"], ["running", "num"], ["finished", "num"], ["trained", "num"], ["dropped", "num"]],
        accounts.map((row) => row.slice(1).map((value) => typeof value === "number" ? number(value) : plain(value))), { class: "plain counts" }));
    }
    if (spans.length || rows.length) {
      const from = Math.min(...spans.map((span) => span.start), ...rows.map((row) => row.started));
      const to = Math.max(...spans.map((span) => span.end), ...rows.map((row) => row.ended));
      const length = Math.max(to - from, 1e-9);
      parts.push(el("h2", {}, "Stages"), el("div", { class: "lanes" }, spans.map((span) => lane(
        plain(span.stage), el("div", { class: "lane" }, bar(span, from, length)), seconds(span.end - span.start),
        `${clock(span.start)}${span.version === null ? "" : `, weights ${span.version}`}${span.rows ? `, ${span.rows} rows` : ""}`))),
        axis(length));
      if (rows.length) parts.push(...sessions(rows, from, length));
    }
    for (const file of data) {
      parts.push(el("p", {}, el("a", { href: `#/trajectories?file=${encodeURIComponent(`${file.partition}-${file.step}`)}` }, `${file.trajectories.length} ${plain(file.partition)} trajectories of this step in the list`)));
    }
    if (!parts.length) parts.push(el("p", {}, "Nothing is recorded of this step."));
    body.replaceChildren(...parts);
  }

  function sessions(rows, from, length) {
    const workers = [...new Set(rows.map((row) => row.worker || "?"))].sort();
    const known = rows.map((row) => row.reward).filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const strength = (row) => row.reward === null || high === low ? 0.6 : (row.reward - low) / (high - low);
    const sorted = [...rows].sort((a, b) => a.started - b.started);
    return [el("h2", {}, "Sessions"), el("p", { class: "hint" }, `${rows.length} sessions on ${workers.length} worker${workers.length > 1 ? "s" : ""}, by their start, on the axis of the stages. The stronger a bar, the higher its reward.`),
      el("div", { class: "lanes sessions" }, sorted.map((row) => lane(
        el("a", { href: links.trajectory(row.key), class: "row-link mono" }, plain(row.key)),
        el("div", { class: "lane" }, el("span", { class: `bar session${row.invalid ? " invalid" : ""}`, title: `${row.worker || ""} ${seconds(row.ended - row.started)}`,
          style: { "--k": strength(row).toFixed(2), left: `${((row.started - from) / length * 100).toFixed(3)}%`, width: `${Math.max(0.15, (row.ended - row.started) / length * 100).toFixed(3)}%` } })),
        seconds(row.ended - row.started), row.invalid ? "invalid" : `reward ${number(row.reward)}`))), axis(length)];
  }

  function lane(label, bars, took, note) {
    return el("div", { class: "lane-row" }, el("span", { class: "lane-name" }, label), bars, el("span", { class: "lane-took num" }, took), el("span", { class: "lane-note" }, note));
  }

  function axis(length) {
    const marks = [0, 0.25, 0.5, 0.75, 1];
    return el("div", { class: "lane-row axis", "aria-hidden": "true" }, el("span", { class: "lane-name" }),
      el("div", { class: "lane" }, marks.map((mark) => el("span", { style: { left: `${mark * 100}%` } }, mark ? seconds(mark * length) : "0"))), el("span", { class: "lane-took" }), el("span", { class: "lane-note" }));
  }

  return { steps, step, pager };
})();
