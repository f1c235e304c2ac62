"use strict";
// The page of one trajectory, and the page of a group.
RLFLOW.trajectory = (() => {
  const { el, number, seconds, clock, date, visible, plain, table, folded, scroller, links, tokens, quantities } = RLFLOW;

  const reward = (row) => row.invalid ? el("span", { class: "bad" }, "invalid") : number(row.reward);
  const weights = (row) => row.min_version === null ? "–" : row.min_version === row.max_version ? String(row.min_version) : `${row.min_version} to ${row.max_version}`;
  const text = (value) => typeof value === "string" ? visible(value) : visible(JSON.stringify(value));

  function facts(entries) {
    return el("dl", { class: "tiles small" }, entries.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value))));
  }

  function walker(row, near) {
    const link = (key, title, rel) => key ? el("a", { class: "button", rel, href: links.trajectory(key) }, title) : el("span", { class: "button off", "aria-disabled": "true" }, title);
    return el("nav", { class: "walker", "aria-label": "Trajectories" }, link(near.before, "← Previous", "prev"), link(near.after, "Next →", "next"),
      el("span", { class: "hint" }, `${near.at + 1} of ${near.count}`), el("a", { href: links.group(row.uid) }, "Group"), el("a", { href: links.step(row.step) }, `Step ${row.step}`));
  }

  /** Fills the page of a trajectory; `near` as RLFLOW.list.neighbours. */
  function show(file, row, near, body) {
    const group = file.trajectories.filter((other) => other.uid === row.uid);
    const prompt = file.prompts[row.prompt];
    const extra = Object.entries(row.reward_extra_info || {});
    body.replaceChildren(
      walker(row, near),
      row.invalid ? el("p", { class: "banner bad" }, el("b", {}, "The reward is invalid: "), visible(row.invalid), " The sample is masked: it trains nothing and does not count in its group.") : "",
      facts([["Reward", reward(row)], ["Advantage", number(row.advantage)], ["Tokens", `${prompt.ids.length} + ${row.response_ids.length}`], ["Stopped by", plain(row.stop_reason || "–")],
        ["Weights", weights(row)], ["Turns", row.num_turns], ["Worker", plain(row.worker || "")], ["Source", plain(row.data_source || "")], ["Truth", row.ground_truth === null ? null : text(row.ground_truth)],
        ...extra.map(([name, value]) => [plain(name), text(value)])]),
      el("h2", {}, "Prompt"), el("div", { class: "prompt", dir: "auto", tabindex: "0", role: "region", "aria-label": "Prompt" }, prompt.tokens.length ? prompt.tokens.map((part) => tokens.tokenNodes(part)) : visible(prompt.text, true)),
      el("h2", {}, "Response"), tokens.view(row, group),
      el("h2", {}, `Group of ${group.length}`), groupTable(group, row.key),
      el("div", { class: "cols" },
        el("div", {}, el("h2", {}, "What happened"), states(row)),
        el("div", {}, el("h2", {}, "Fields"), el("p", { class: "hint" }, "In the order in which they were written."), fields(row), Object.keys(row.timings).length ? folded("Timings of the session", () => table([["part", ""], ["took", "num"]], Object.entries(row.timings).map(([name, value]) => [plain(name), typeof value === "number" ? seconds(value) : plain(value)]))) : "")));
  }

  function states(row) {
    const first = row.states.length ? row.states[0][1] : 0;
    return el("ol", { class: "states" }, row.states.map(([name, start, end, note]) => el("li", { class: `state-${name}` },
      el("div", { class: "state-head" }, el("b", {}, plain(name)), el("span", { class: "hint num" }, el("time", { title: date(start) }, clock(start)), `, after ${seconds(start - first)}`, end === null ? "" : `, took ${seconds(end - start)}`)),
      note ? el("div", { class: "wrap" }, visible(note)) : "")));
  }

  function fields(row) {
    const reader = ([stage, time, optional]) => el("li", { title: time === null ? "" : date(time) }, plain(stage), optional ? " (if there)" : "", " ");
    const line = ([name, writer, time, version, readers]) => [
      el("span", { class: "mono" }, plain(name)), el("span", {}, plain(writer), time === null ? "" : el("small", {}, ` ${clock(time)}`)), version === null ? "–" : String(version),
      readers.length ? el("ul", { class: "inline" }, readers.map(reader)) : el("span", { class: "hint" }, "nobody")];
    const show = (some) => table([["field", ""], ["written by", ""], ["weights", "num"], ["read next by", ""]], some.map(line), { class: "plain cards" });
    // Fields that travel along for the record would bury the ones a step works on.
    const used = ([name, , , , readers]) => readers.length > 0 || name in row.series;
    const rest = row.fields.filter((field) => !used(field));
    if (!row.fields.length) return el("p", {}, "The record names no writers.");
    return el("div", {}, show(row.fields.filter(used)), rest.length ? folded(`${rest.length} more that no stage reads`, () => show(rest)) : "");
  }

  function groupTable(group, here) {
    const known = group.filter((row) => row.reward !== null && !row.invalid).map((row) => row.reward);
    const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    const rows = group.map((row) => el("tr", { class: row.key === here ? "here" : null },
      el("th", { scope: "row" }, el("a", { href: links.trajectory(row.key), class: "mono row-link", "aria-current": row.key === here ? "true" : null }, plain(row.key)), row.is_final ? null : el("span", { class: "tag" }, "part")),
      el("td", { class: "num", "data-title": "reward" }, reward(row)), el("td", { class: "num", "data-title": "advantage" }, number(row.advantage)), el("td", { class: "num", "data-title": "tokens" }, number(row.response_ids.length)),
      el("td", { class: "narrow-off", "data-title": "stop" }, plain(row.stop_reason || "")), el("td", { class: "text" }, el("span", { class: "snippet", dir: "auto" }, visible(row.response_text.slice(0, 140))))));
    return el("div", {}, mean === null ? "" : el("p", { class: "hint" }, `Mean reward ${number(mean)} of ${known.length}.`),
      table([["key", ""], ["reward", "num"], ["adv", "num"], ["tokens", "num"], ["stop", "narrow-off"], ["response", "text"]], rows, { class: "plain list" }));
  }

  /** Fills the page of a group. */
  function showGroup(file, uid, body) {
    const group = file.trajectories.filter((row) => row.uid === uid);
    const life = file.lives[uid];
    const prompt = file.prompts[group[0].prompt];
    const responses = el("div", { class: "responses" });
    const legend = el("div", { class: "legend-holder" });
    function paint() {
      const quantity = tokens.quantityFor(group[0]);
      const most = quantities.scale(quantity, group);
      legend.replaceChildren(quantities.legend(quantity, most));
      responses.replaceChildren(...group.map((row) => el("article", { class: "response" },
        el("h3", {}, el("a", { href: links.trajectory(row.key), class: "mono row-link" }, plain(row.key)), el("span", {}, "reward ", el("b", {}, reward(row))), el("span", {}, "advantage ", el("b", {}, number(row.advantage))), el("span", {}, `${row.response_ids.length} tokens`)),
        tokens.strip(row, quantity, most))));
    }
    paint();
    body.replaceChildren(
      el("nav", { class: "walker", "aria-label": "Group" }, el("a", { href: links.step(file.step) }, `Step ${file.step}`)),
      life ? facts([["State", life.state], ["Issued", date(life.issued)], ["Sessions", life.sessions], ["Failed sessions", life.sessions_failed || null], ["Why", life.reason ? visible(life.reason) : null], ["Weights", life.version]]) : "",
      el("h2", {}, "Prompt"), el("div", { class: "prompt", dir: "auto", tabindex: "0", role: "region", "aria-label": "Prompt" }, visible(prompt.text, true)),
      el("h2", {}, "Rewards"), groupTable(group, null),
      el("h2", {}, "Responses"), tokens.chooser(group[0], paint), legend, responses);
  }

  return { show, showGroup, scroller };
})();
