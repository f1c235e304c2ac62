"use strict";
// The list of all trajectories: filter, sort, full-text search. What is chosen is in the address.
RLFLOW.list = (() => {
  const { el, need, number, table, visible, plain, links, announce } = RLFLOW;
  const PAGE = 100;
  const COLUMNS = [["key", "key", ""], ["file", "step", ""], ["reward", "reward", "num"], ["advantage", "adv", "num"], ["tokens", "tokens", "num"],
    ["stop", "stop", "narrow-off"], ["source", "source", "narrow-off"], ["text", "response", "text"]];
  const REWARDS = {
    "": ["any reward", () => true],
    positive: ["reward above 0", (row) => row.reward > 0],
    zero: ["reward 0", (row) => row.reward === 0],
    negative: ["reward below 0", (row) => row.reward < 0],
    invalid: ["invalid reward", (row) => row.invalid !== null],
  };
  let rowsOfAll = null;
  let order = [];
  let texts = null;

  /** All rows as objects, from the index file. */
  async function all() {
    if (!rowsOfAll) {
      const index = await need("index");
      rowsOfAll = index.rows.map((row, place) => Object.fromEntries([...index.columns.map((name, i) => [name, row[i]]), ["place", place]]));
      order = rowsOfAll.map((row) => row.key);
    }
    return rowsOfAll;
  }

  /** key -> text to search; loaded with the first search. */
  async function searchable() {
    if (!texts) {
      const index = await need("index");
      const parts = await Promise.all(Array.from({ length: index.texts }, (_, i) => need(`text-${i}`)));
      texts = new Map(parts.flat());
    }
    return texts;
  }

  async function chosen(state) {
    let rows = (await all()).filter((row) => (!state.file || row.file === state.file) && (REWARDS[state.reward] || REWARDS[""])[1](row));
    if (state.q) {
      const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
      const full = await searchable();
      rows = rows.filter((row) => {
        const text = `${row.key}\n${row.source || ""}\n${row.stop || ""}\n${full.get(row.key) || ""}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
    }
    if (state.sort) {
      const sign = state.dir === "desc" ? -1 : 1;
      const value = (row) => state.sort === "file" || state.sort === "key" ? row.place : row[state.sort];
      rows = [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === y) return a.place - b.place;
        if (x === null || y === null) return x === null ? 1 : -1; // what is not known comes last either way
        return (x < y ? -1 : 1) * sign;
      });
    }
    return rows;
  }

  const href = (state) => {
    const kept = Object.entries(state).filter(([name, value]) => value && !(name === "page" && Number(value) === 1));
    const query = new URLSearchParams(kept).toString();
    return `#/trajectories${query ? `?${query}` : ""}`;
  };

  /** The controls stay while the results change, so that typing keeps its place. `go(href)` changes the address. */
  async function show(run, body, state, go) {
    await all();
    if (!body.querySelector(".controls")) body.replaceChildren(controls(run, go), el("p", { class: "hint", role: "status", id: "list-count" }), el("div", { class: "results" }));
    const form = body.querySelector(".controls");
    form.state = state;
    for (const name of ["q", "file", "reward", "sort"]) {
      const field = form.elements[name];
      if (field && document.activeElement !== field) field.value = name === "sort" ? `${state.sort || ""}${state.dir === "desc" ? "-" : ""}` : state[name] || "";
    }
    const rows = await chosen(state);
    if (form.state !== state) return; // typed on meanwhile
    order = rows.map((row) => row.key);
    const page = Math.max(1, Math.min(Number(state.page) || 1, Math.ceil(rows.length / PAGE) || 1));
    const from = (page - 1) * PAGE;
    const summary = rows.length === rowsOfAll.length ? `${rows.length} trajectories` : `${rows.length} of ${rowsOfAll.length} trajectories`;
    body.querySelector("#list-count").textContent = rows.length > PAGE ? `${summary}, ${from + 1} to ${Math.min(from + PAGE, rows.length)} shown` : summary;
    body.querySelector(".results").replaceChildren(
      rows.length ? table([], rows.slice(from, from + PAGE).map(line), { class: "plain list", "aria-label": "Trajectories" }) : el("p", { class: "empty" }, rowsOfAll.length ? "No trajectory fits. Take a filter away." : "No trajectory is recorded: trainer.trace.trajectories_per_step is 0, or no step is trained yet."),
      RLFLOW.timeline.pager(page, Math.ceil(rows.length / PAGE), (to) => href({ ...state, page: to })) || "");
    const head = body.querySelector(".list thead tr");
    if (head) head.replaceChildren(...COLUMNS.map((column) => header(column, state)));
  }

  function header([name, title, style], state) {
    const here = state.sort === name;
    const dir = here && state.dir !== "desc" ? "desc" : "";
    const mark = here ? (state.dir === "desc" ? " ↓" : " ↑") : "";
    const sort = here ? (state.dir === "desc" ? "descending" : "ascending") : null;
    if (name === "text") return el("th", { scope: "col", class: style }, title);
    return el("th", { scope: "col", class: style, "aria-sort": sort }, el("a", { href: href({ ...state, sort: name, dir, page: 1 }), title: `Sort by ${title}` }, title, el("span", { "aria-hidden": "true" }, mark)));
  }

  function line(row) {
    const [partition, step] = [row.file.slice(0, row.file.lastIndexOf("-")), row.file.slice(row.file.lastIndexOf("-") + 1)];
    const cells = [
      el("th", { scope: "row" }, el("a", { href: links.trajectory(row.key), class: "row-link mono" }, plain(row.key)), row.final ? null : el("span", { class: "tag", title: "not the last output of its session" }, "part")),
      cell("step", "", partition === "train" ? step : `${partition} ${step}`),
      cell("reward", `num${row.invalid === null ? "" : " bad"}`, row.invalid === null ? number(row.reward) : "invalid"),
      cell("adv", "num", number(row.advantage, 3)), cell("tokens", "num", number(row.tokens)),
      cell("stop", "narrow-off", plain(row.stop || "")), cell("source", "narrow-off", plain(row.source || "")),
      el("td", { class: "text" }, el("span", { class: "snippet", dir: "auto" }, visible(row.text))),
    ];
    return el("tr", {}, cells);
  }

  const cell = (title, style, content) => el("td", { class: style, "data-title": title }, content);

  function controls(run, go) {
    const field = (title, id, control, style = "") => el("div", { class: `field ${style}` }, el("label", { for: id }, title), control);
    const select = (name, options) => el("select", { name, id: `list-${name}` }, options.map(([value, title]) => el("option", { value }, title)));
    const orders = ["reward", "advantage", "tokens"].flatMap((name) => [[name, `${name}, lowest first`], [`${name}-`, `${name}, highest first`]]);
    const steps = run.files.map(([name, step, partition]) => [name, partition === "train" ? `step ${step}` : `${plain(partition)}, step ${step}`]);
    const form = el("form", { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
      field("Search", "search", el("input", { type: "search", name: "q", id: "search", autocomplete: "off", spellcheck: "false", placeholder: "prompt, response, truth, key", onfocus: () => { searchable().catch(() => {}); } }), "grow"),
      field("Step", "list-file", select("file", [["", "all steps"], ...steps])),
      field("Reward", "list-reward", select("reward", Object.entries(REWARDS).map(([value, [title]]) => [value, title]))),
      field("Order", "list-sort", select("sort", [["", "as recorded"], ...orders]), "narrow-on"));
    let timer = 0;
    const changed = () => {
      const value = (name) => form.elements[name].value;
      const sort = window.matchMedia("(max-width: 640px)").matches ? value("sort") : null;
      const sorted = sort === null ? {} : { sort: sort.replace(/-$/, ""), dir: sort.endsWith("-") ? "desc" : "" };
      go(href({ ...form.state, q: value("q").trim(), file: value("file"), reward: value("reward"), ...sorted, page: 1 }));
    };
    form.addEventListener("change", changed);
    form.addEventListener("input", (event) => { if (event.target.type === "search") { clearTimeout(timer); timer = setTimeout(changed, 120); } });
    return form;
  }

  /** Keys before and after a key, in the order of the list as it was last shown. */
  async function neighbours(key) {
    await all();
    let keys = order;
    if (!keys.includes(key)) keys = rowsOfAll.map((row) => row.key);
    const at = keys.indexOf(key);
    return { before: keys[at - 1] || null, after: keys[at + 1] || null, at, count: keys.length };
  }

  return { show, all, neighbours, announce };
})();
