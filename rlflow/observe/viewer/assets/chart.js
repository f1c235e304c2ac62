"use strict";
// Line charts: a pointer or the arrow keys move a cursor that all charts of the page share; the numbers are a table too.
RLFLOW.charts = (() => {
  const { el, svg, number, folded, table, scroller } = RLFLOW;
  const HEIGHT = 168;
  const PAD = { left: 46, right: 10, top: 12, bottom: 22 };
  const all = new Map(); // plot -> its moveTo

  /** Round positions between low and high, about `count` of them. */
  function ticks(low, high, count, whole = false) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].map((k) => k * power).find((candidate) => candidate >= raw * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  }

  function extent(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) if (value !== null && value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low === Infinity) return [0, 1];
    if (low === high) { const room = Math.abs(low) * 0.1 || 1; return [low - room, high + room]; }
    const room = (high - low) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  /** One chart of `run` (steps, metrics) as `spec` says (title, series, band, help); `onopen(step)` for Enter and click. */
  function chart(run, spec, onopen) {
    const steps = run.steps;
    const lines = spec.series.map(([name, label], k) => ({ name, label, k, values: run.metrics[name] || [] }));
    const band = spec.band ? spec.band.map((name) => run.metrics[name]) : null;
    const known = steps.map((_, i) => i).filter((i) => lines.some((line) => line.values[i] !== null && line.values[i] !== undefined));
    const holder = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `${spec.title}: ${known.length} points. Arrow keys read them, Enter opens the step.` });
    const readout = el("p", { class: lines.length > 1 ? "readout two" : "readout" });
    const state = { at: null, scales: null, cursor: null };

    function say(i) {
      if (i === null) return lines.length > 1 ? lines.map((line) => [el("span", { class: `key line-${line.k}` }), `${RLFLOW.plain(line.label)} `]) : [RLFLOW.plain(lines[0].name)];
      const parts = lines.map((line) => [el("span", { class: `key line-${line.k}` }), lines.length > 1 ? `${RLFLOW.plain(line.label)} ` : "", el("b", {}, number(line.values[i])), " "]);
      const edge = band && band[0][i] !== null ? `(${number(band[0][i])} to ${number(band[1][i])})` : "";
      return [`step ${steps[i]}: `, parts, edge];
    }

    /** Puts the cursor on the point nearest to a step; null takes it away. */
    function moveTo(step) {
      let best = null;
      if (step !== null) for (const i of known) if (best === null || Math.abs(steps[i] - step) < Math.abs(steps[best] - step)) best = i;
      state.at = best;
      readout.replaceChildren(...say(best).flat(Infinity));
      if (!state.scales) return;
      state.cursor.replaceChildren();
      if (best === null) return;
      const { x, y } = state.scales;
      state.cursor.append(svg("line", { x1: x(steps[best]), x2: x(steps[best]), y1: PAD.top, y2: HEIGHT - PAD.bottom }),
        ...lines.filter((line) => line.values[best] !== null && line.values[best] !== undefined)
          .map((line) => svg("circle", { cx: x(steps[best]), cy: y(line.values[best]), r: 3.5, class: `dot-${line.k}` })));
    }

    function draw() {
      const width = Math.max(200, Math.round(holder.clientWidth));
      const [low, high] = extent(lines.flatMap((line) => line.values).concat(band ? band.flat() : []));
      const [first, last] = known.length > 1 ? [steps[known[0]], steps[known[known.length - 1]]] : [(steps[known[0]] || 0) - 1, (steps[known[0]] || 0) + 1];
      const x = (step) => PAD.left + (step - first) / (last - first) * (width - PAD.left - PAD.right);
      const y = (value) => HEIGHT - PAD.bottom - (value - low) / (high - low) * (HEIGHT - PAD.top - PAD.bottom);
      const points = (values) => known.filter((i) => values[i] !== null && values[i] !== undefined).map((i) => `${x(steps[i]).toFixed(1)},${y(values[i]).toFixed(1)}`);
      const root = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
      for (const at of ticks(low, high, 4)) {
        root.append(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(at), y2: y(at) }),
          svg("text", { x: PAD.left - 6, y: y(at) + 4, "text-anchor": "end" }, number(at, 3)));
      }
      for (const at of ticks(first, last, Math.min(6, width / 70), true)) {
        if (at >= first && at <= last && (known.length > 1 || at === steps[known[0]])) root.append(svg("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, String(at)));
      }
      if (band) root.append(svg("polygon", { class: "band", points: points(band[1]).concat(points(band[0]).reverse()).join(" ") }));
      for (const line of lines) {
        root.append(svg("polyline", { class: `line line-${line.k}`, points: points(line.values).join(" ") }));
        if (known.length <= 24) for (const point of points(line.values)) { const [cx, cy] = point.split(","); root.append(svg("circle", { cx, cy, r: 2, class: `dot-${line.k}` })); }
      }
      state.scales = { x, y, first, last, width };
      state.cursor = svg("g", { class: "cursor" });
      root.append(state.cursor);
      holder.replaceChildren(root);
      moveTo(state.at === null ? null : steps[state.at]);
    }

    const shared = (step) => {
      for (const [plot, move] of all) if (plot.isConnected) move(step); else all.delete(plot);
    };
    holder.addEventListener("pointermove", (event) => {
      if (!state.scales) return;
      const { first, last, width } = state.scales;
      shared(first + (event.clientX - holder.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right) * (last - first));
    });
    holder.addEventListener("pointerleave", () => { if (document.activeElement !== holder) shared(null); });
    holder.addEventListener("blur", () => shared(null));
    holder.addEventListener("click", () => { if (state.at !== null) onopen(steps[state.at]); });
    holder.addEventListener("keydown", (event) => {
      const place = state.at === null ? known.length - 1 : known.indexOf(state.at);
      const next = { ArrowLeft: state.at === null ? place : place - 1, ArrowRight: place + 1, Home: 0, End: known.length - 1 }[event.key];
      if (event.key === "Enter" && state.at !== null) onopen(steps[state.at]);
      else if (next !== undefined) {
        shared(steps[known[Math.max(0, Math.min(known.length - 1, next))]]);
        RLFLOW.announce(readout.textContent);
        event.preventDefault();
      }
    });
    all.set(holder, moveTo);
    new ResizeObserver(draw).observe(holder);
    moveTo(null);

    const columns = [["step", "num"], ...lines.map((line) => [RLFLOW.plain(line.label), "num"]), ...(band ? [["from", "num"], ["to", "num"]] : [])];
    const rows = () => known.map((i) => [String(steps[i]), ...lines.map((line) => number(line.values[i])), ...(band ? band.map((values) => number(values[i])) : [])]);
    return el("figure", { class: "chart" }, el("figcaption", { title: spec.help || "" }, spec.head || spec.title), readout, holder,
      folded("Numbers", () => scroller(`${spec.title}, numbers`, table(columns, rows()))));
  }

  return { chart };
})();
