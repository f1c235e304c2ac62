"use strict";
// Which page is shown: the part of the address after #. Keys, focus, titles.
(() => {
  const { el, need, date, plain, announce, links, list, timeline, trajectory, charts } = RLFLOW;
  const main = document.getElementById("main");
  const problem = document.getElementById("problem");
  const runTitle = document.title;
  const scrolls = new Map();
  let run = null;
  let shown = "";
  let previousPage = "";

  const pageOf = (name) => document.getElementById(`page-${name}`);
  const bodyOf = (name) => pageOf(name).querySelector(".body");

  /** {page, name, query} of an address; the overview for anything else. */
  function parse(hash) {
    const [path, query] = hash.replace(/^#\/?/, "").split("?");
    const [page, ...rest] = path.split("/");
    let name = rest.join("/");
    try { name = decodeURIComponent(name); } catch { /* a broken escape stays as it is */ }
    return { page: page || "overview", name, query: Object.fromEntries(new URLSearchParams(query || "")) };
  }

  const pages = {
    overview: async () => "Overview",
    config: async () => "Configuration",
    steps: async (name, query) => {
      if (name !== "") return pages.step(name);
      timeline.steps(run, bodyOf("steps"), Math.max(1, Number(query.page) || 1));
      return "Steps";
    },
    step: async (name) => {
      const step = Number(name);
      const files = run.files.filter(([, at]) => at === step);
      timeline.step(run, await Promise.all(files.map(([file]) => need(file))), step, bodyOf("step"));
      return `Step ${step}`;
    },
    trajectories: async (_, query) => { await list.show(run, bodyOf("trajectories"), query, replace); return "Trajectories"; },
    trajectory: async (key) => {
      const file = await need(await fileOf((row) => row.key === key, key));
      trajectory.show(file, file.trajectories.find((row) => row.key === key), await list.neighbours(key), bodyOf("trajectory"));
      return plain(key);
    },
    group: async (uid) => {
      const file = await need(await fileOf((row) => row.key.startsWith(`${uid}_`), uid));
      trajectory.showGroup(file, uid, bodyOf("group"));
      return `Group ${plain(uid)}`;
    },
  };

  async function fileOf(fits, name) {
    const row = (await list.all()).find(fits);
    if (!row) throw new Error(`These pages have no trajectory ${plain(name)}.`);
    return row.file;
  }

  /** Shows what the address says. */
  async function route() {
    const hash = location.hash;
    if (hash && !hash.startsWith("#/")) return; // a place within the page
    const { page, name, query } = parse(hash);
    const target = page === "steps" && name !== "" ? "step" : pages[page] ? page : "overview";
    const turn = (shown = hash);
    document.body.setAttribute("aria-busy", "true");
    let title;
    problem.hidden = true;
    try {
      title = await (pages[page] || pages.overview)(name, query);
    } catch (error) {
      if (turn !== shown) return;
      problem.textContent = `${error.message} rlflow view makes the pages anew.`;
      problem.hidden = false;
      title = "Not found";
      settled(hash);
      problem.scrollIntoView({ block: "nearest" });
      return;
    }
    if (turn !== shown) return; // another address was asked for meanwhile
    const same = target === previousPage;
    for (const section of main.querySelectorAll(".page")) section.hidden = section.id !== `page-${target}`;
    settled(hash);
    document.title = `${title} · ${runTitle}`;
    const heading = pageOf(target).querySelector("h1");
    if (!["overview", "config"].includes(target)) heading.textContent = title;
    const nav = { step: "steps", trajectory: "trajectories", group: "trajectories" }[target] || target;
    for (const link of document.querySelectorAll("nav [data-page]")) {
      if (link.dataset.page === nav) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    if (previousPage && (!same || target === "trajectory" || target === "group" || target === "step")) {
      heading.focus({ preventScroll: true });
      window.scrollTo(0, scrolls.get(hash) || 0);
    }
    previousPage = target;
  }

  /** The page shows what the address `hash` says. */
  function settled(hash) {
    document.documentElement.dataset.shown = hash;
    document.body.removeAttribute("aria-busy");
    document.documentElement.classList.remove("starting");
  }

  /** Follows a link; its page starts at the top, while going back returns to where one was. */
  function go(hash) {
    scrolls.delete(hash);
    location.hash = hash;
  }

  /** Changes the address without a step of history: for filters while they are typed. */
  function replace(hash) {
    history.replaceState(null, "", hash);
    route();
  }

  // ----- keys -----------------------------------------------------------------------------------------------------

  const dialog = document.getElementById("keys");
  const single = document.getElementById("single-keys");
  const store = { // storage may be refused to pages from disk
    get: (name) => { try { return localStorage.getItem(name); } catch { return null; } },
    set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* then it holds for this visit */ } },
  };
  single.checked = store.get("rlflow-single-keys") !== "off";
  single.addEventListener("change", () => store.set("rlflow-single-keys", single.checked ? "on" : "off"));
  const help = () => { if (!dialog.open) dialog.showModal(); };
  document.getElementById("keys-button").addEventListener("click", help);

  /** j and k: the next row's link in a list, the next trajectory on a trajectory's page. */
  async function walk(direction) {
    const { page, name } = parse(location.hash);
    if (page === "trajectory") {
      // By the address, not by the page: keys may come faster than pages.
      const near = await list.neighbours(name);
      const key = direction > 0 ? near.after : near.before;
      if (key) go(links.trajectory(key)); else announce(direction > 0 ? "This is the last one." : "This is the first one.");
      return;
    }
    const section = [...main.querySelectorAll(".page")].find((node) => !node.hidden);
    const rows = [...section.querySelectorAll(".row-link")];
    if (!rows.length) return;
    const at = rows.indexOf(document.activeElement);
    const next = at < 0 ? (direction > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + direction));
    rows[next].focus();
    rows[next].scrollIntoView({ block: "nearest" });
    if (page === "steps" && name !== "") announce(rows[next].textContent);
  }

  function up() {
    const { page, name } = parse(location.hash);
    if (page === "trajectory" || page === "group") go(listAddress);
    else if (page === "steps" && name !== "") go("#/steps");
    else go("#/overview");
  }
  let listAddress = "#/trajectories";

  function nextColour() {
    const section = [...main.querySelectorAll(".page")].find((node) => !node.hidden);
    const options = [...section.querySelectorAll("input[name=quantity]")];
    if (!options.length) return;
    const next = options[(options.findIndex((option) => option.checked) + 1) % options.length];
    next.click();
    announce(`Colour by ${next.parentElement.textContent}`);
  }

  async function search() {
    if (!location.hash.startsWith("#/trajectories") && !location.hash.startsWith("#/config")) go(listAddress);
    const id = location.hash.startsWith("#/config") ? "config-search" : "search";
    for (let tries = 0; tries < 20 && !(document.getElementById(id) && document.getElementById(id).offsetParent); tries++) await new Promise(requestAnimationFrame);
    const field = document.getElementById(id);
    if (field) field.focus();
  }

  const actions = {
    j: () => walk(1), k: () => walk(-1), u: up, c: nextColour, "?": help, "/": search,
    g: () => { const { page, name } = parse(location.hash); if (page === "trajectory") go(links.group(name.replace(/_\d+_\d+$/, ""))); },
    1: () => go("#/overview"), 2: () => go("#/steps"), 3: () => go(listAddress), 4: () => go("#/config"),
  };
  document.addEventListener("keydown", (event) => {
    if (!single.checked || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.closest("input:not([type=radio]):not([type=checkbox]), select, textarea")) return;
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });

  // ----- start ----------------------------------------------------------------------------------------------------

  function configPage() {
    const field = document.getElementById("config-search");
    if (!field) return;
    const changed = document.getElementById("config-changed");
    const rows = [...document.querySelectorAll("#config-table tbody tr")];
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = (changed && changed.checked && !row.classList.contains("changed")) || !words.every((word) => text.includes(word));
        count += row.hidden ? 0 : 1;
      }
      document.getElementById("config-count").textContent = count === rows.length ? `${count} keys` : `${count} of ${rows.length} keys`;
    };
    field.addEventListener("input", apply);
    if (changed) changed.addEventListener("change", apply);
  }

  function overviewCharts() {
    const holder = document.getElementById("charts");
    const open = (step) => go(links.step(step));
    const nodes = run.charts.map((spec) => charts.chart(run, spec, open));
    const names = Object.keys(run.metrics);
    if (names.length) nodes.push(anyMetric(names, open));
    holder.replaceChildren(...(nodes.length ? nodes : [el("p", {}, "No numbers yet.")]));
  }

  /** A chart of any metric the run has. */
  function anyMetric(names, open) {
    const groups = new Map();
    for (const name of names) { const head = name.split("/")[0]; groups.set(head, [...(groups.get(head) || []), name]); }
    const select = el("select", { "aria-label": "Metric" }, [...groups].map(([head, members]) => el("optgroup", { label: plain(head) }, members.map((name) => el("option", { value: name }, plain(name))))));
    let figure = null;
    const draw = () => {
      const title = select.value;
      const spec = { title: plain(title), head: select, series: [[title, title]], band: null, help: run.help[title] };
      const next = charts.chart(run, spec, open);
      if (figure) figure.replaceWith(next);
      figure = next;
      return next;
    };
    select.value = names.find((name) => name === "timing_s/step") || names[0];
    select.addEventListener("change", () => { draw(); select.focus(); });
    return draw();
  }

  async function start() {
    for (const node of document.querySelectorAll("time[data-unix]")) node.textContent = date(Number(node.dataset.unix));
    document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); main.scrollIntoView(); });
    configPage();
    run = await need("run");
    overviewCharts();
    window.addEventListener("hashchange", (event) => {
      const from = new URL(event.oldURL).hash;
      if (from.startsWith("#/trajectories")) listAddress = from;
      route();
    });
    history.scrollRestoration = "manual";
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a[href^='#/']");
      if (link) scrolls.delete(link.getAttribute("href"));
    });
    document.addEventListener("scrollend", () => scrolls.set(location.hash, window.scrollY));
    await route();
  }

  start().catch((error) => { settled(location.hash); problem.textContent = `${error.message}. rlflow view makes the pages anew.`; problem.hidden = false; });
})();
