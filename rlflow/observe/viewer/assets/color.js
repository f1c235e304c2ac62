"use strict";
// The quantities a token can be coloured by, and their colours. Never colour alone: the inspector has the numbers.
RLFLOW.quantities = (() => {
  const { el, number } = RLFLOW;
  const difference = (a, b) => (row) => {
    const [left, right] = [row.series[a], row.series[b]];
    return left && right ? left.map((value, i) => value === null || right[i] === null || right[i] === undefined ? null : value - right[i]) : null;
  };
  const series = (name) => (row) => row.series[name] || null;

  // signed: around 0 in two colours; else from 0 up in one. `least`: the scale never ends below it, so that noise stays pale.
  const ALL = [
    { id: "advantage", label: "Advantage", of: series("advantages"), signed: true, least: 1e-6 },
    { id: "old-rollout", label: "Old − rollout", of: difference("old_log_probs", "rollout_log_probs"), signed: true, least: 0.01,
      help: "log-prob by the trainer minus log-prob by the rollout engine" },
    { id: "old-ref", label: "Old − ref", of: difference("old_log_probs", "ref_log_prob"), signed: true, least: 0.01,
      help: "log-prob by the actor minus log-prob by the reference" },
    { id: "surprise", label: "Surprise", of: (row) => { const found = row.series.rollout_log_probs || row.series.old_log_probs; return found ? found.map((v) => v === null ? null : -v) : null; },
      signed: false, least: 0.1, help: "minus the log-prob of the token, in nats" },
    { id: "entropy", label: "Entropy", of: series("entropy"), signed: false, least: 0.1, help: "in nats" },
    { id: "value", label: "Value", of: series("values"), signed: true, least: 1e-6 },
    { id: "reward", label: "Token reward", of: (row) => row.series.token_level_rewards || row.series.rm_scores || null, signed: true, least: 1e-6 },
    { id: "mask", label: "Mask", of: (row) => row.response_mask.length ? row.response_mask : null, mask: true, help: "1: trains, 0: the loss leaves it out" },
    { id: "none", label: "None", of: () => [] },
  ];
  // What the inspector and the table of tokens show.
  const SHOWN = [
    ["rollout", series("rollout_log_probs"), "log-prob by the rollout engine"],
    ["old", series("old_log_probs"), "log-prob by the actor before the update"],
    ["ref", series("ref_log_prob"), "log-prob by the reference"],
    ["old − rollout", ALL[1].of, ALL[1].help],
    ["old − ref", ALL[2].of, ALL[2].help],
    ["entropy", series("entropy"), "in nats"],
    ["value", series("values"), "by the critic"],
    ["advantage", series("advantages"), ""],
    ["return", series("returns"), ""],
    ["reward", (row) => row.series.token_level_rewards || row.series.rm_scores || null, "reward given at this token"],
  ];

  const available = (row) => ALL.filter((quantity) => quantity.of(row));
  const shown = (row) => SHOWN.map(([label, of, help]) => ({ label, values: of(row), help })).filter((item) => item.values);

  /** Largest magnitude over some rows, so that one colour means one number on the whole page. */
  function scale(quantity, rows) {
    let most = quantity.least || 1;
    for (const row of rows) for (const value of quantity.of(row) || []) if (value !== null && Math.abs(value) > most) most = Math.abs(value);
    return most;
  }

  /** Marks a token's element: a class for the sign, a strength from 0 to 1 as a custom property. */
  function paint(node, quantity, value, most) {
    node.classList.remove("pos", "neg", "amount", "off");
    if (value === null || value === undefined || quantity.id === "none") { node.style.removeProperty("--k"); return; }
    if (quantity.mask) { node.classList.add(value ? "pos" : "off"); node.style.setProperty("--k", value ? "0.35" : "0"); return; }
    node.classList.add(quantity.signed ? (value < 0 ? "neg" : "pos") : "amount");
    node.style.setProperty("--k", Math.min(1, Math.abs(value) / most).toFixed(3));
  }

  function legend(quantity, most) {
    if (quantity.id === "none") return el("p", { class: "legend" }, "Tokens without colour.");
    if (quantity.mask) {
      return el("p", { class: "legend" }, el("span", { class: "tok pos", style: { "--k": "0.35" } }, "trains"), " ",
        el("span", { class: "tok off" }, "left out of the loss"));
    }
    const ends = quantity.signed ? [`−${number(most, 3)}`, "0", `+${number(most, 3)}`] : ["0", number(most, 3)];
    return el("p", { class: "legend" }, el("span", {}, ends[0]),
      el("span", { class: quantity.signed ? "ramp signed" : "ramp", "aria-hidden": "true" }),
      el("span", {}, ends[ends.length - 1]), quantity.help ? el("span", { class: "hint" }, quantity.help) : null);
  }

  return { available, shown, scale, paint, legend };
})();
