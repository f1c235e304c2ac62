"use strict";
// Elements, numbers, text that is safe to show, and the data files. No markup is ever made from strings.
const RLFLOW = (() => {
  // The page is written with the overview in it; another page that the address asks for is not preceded by a flash of that.
  if (/^#\/(?!overview)/.test(location.hash)) document.documentElement.classList.add("starting");
  const values = new Map();
  const waiting = new Map();
  const KEEP = 8;

  /** Called by the data files. */
  function add(name, value) {
    values.set(name, value);
    // Files of steps are large: only the last few stay in memory.
    const steps = [...values.keys()].filter((key) => /-\d+$/.test(key) && !key.startsWith("text-"));
    for (const old of steps.slice(0, Math.max(0, steps.length - KEEP))) values.delete(old);
  }

  /** The value of a data file, loaded when it is not there yet. Pages from disk may load scripts, but not fetch. */
  function need(name) {
    if (values.has(name)) return Promise.resolve(values.get(name));
    if (!waiting.has(name)) {
      waiting.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${encodeURIComponent(name)}.js`;
        const done = (act) => { waiting.delete(name); script.remove(); act(); };
        script.onload = () => done(() => values.has(name) ? resolve(values.get(name)) : reject(new Error(`data/${name}.js is damaged`)));
        script.onerror = () => done(() => reject(new Error(`data/${name}.js is missing`)));
        document.head.append(script);
      }));
    }
    return waiting.get(name);
  }

  /** An element: properties by name, `on*` functions, `class`, `data-*` and `aria-*` attributes; children are nodes or text. */
  function el(tag, props = {}, ...children) {
    return fill(document.createElement(tag), props, children);
  }

  function svg(tag, props = {}, ...children) {
    return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
  }

  function fill(node, props, children) {
    for (const [name, value] of Object.entries(props)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  // Controls, formats (bidirectional overrides among them), lone surrogates, private use, line separators.
  const ACTS = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
  const HARMLESS = new Set(["\u200c", "\u200d"]);

  /** Nodes for a text: characters that act instead of being seen are written out; `newlines` keeps \n and \t. */
  function visible(text, newlines = false) {
    const nodes = [];
    let from = 0;
    for (const match of text.matchAll(ACTS)) {
      const char = match[0];
      if (HARMLESS.has(char) || (newlines && (char === "\n" || char === "\t"))) continue;
      if (match.index > from) nodes.push(text.slice(from, match.index));
      from = match.index + char.length;
      const code = char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(el("span", { class: "esc", title: `U+${code}` }, char === "\n" ? "⏎" : char === "\t" ? "⇥" : `U+${code}`));
    }
    if (from < text.length) nodes.push(text.slice(from));
    return nodes;
  }

  /** The same as one string, for labels. */
  function plain(text) {
    return visible(String(text)).map((node) => typeof node === "string" ? node : node.textContent).join("");
  }

  function number(value, digits = 4) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
    const size = Math.abs(value);
    let text = size < 1e-3 || size >= 1e6 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
    return text.replace(/-/g, "−");
  }

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (Math.abs(value) < 0.9995) return `${Math.round(value * 1000)} ms`;
    return value < 100 ? `${value.toFixed(2)} s` : value < 6000 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  const two = (value) => String(value).padStart(2, "0");

  function clock(unix, thousandths = true) {
    const date = new Date(Math.round(unix * 1000));
    const tail = thousandths ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "";
    return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}${tail}`;
  }

  function date(unix) {
    const day = new Date(unix * 1000);
    return `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())} ${clock(unix, false)}`;
  }

  function announce(text) {
    document.getElementById("announce").textContent = text;
  }

  /** A table: columns are [title, class]; rows are arrays of nodes or text. The first column heads its row. */
  function table(columns, rows, props = {}) {
    const cell = (content, number_) => number_ === 0
      ? el("th", { scope: "row", class: columns[0][1] }, content)
      : el("td", { class: columns[number_][1], "data-title": columns[number_][0] }, content);
    return el("table", { class: "plain", ...props },
      el("thead", {}, el("tr", {}, columns.map(([title, name]) => el("th", { scope: "col", class: name }, title)))),
      el("tbody", {}, rows.map((row) => row instanceof Node ? row : el("tr", {}, row.map(cell)))));
  }

  /** A <details> whose content is made when it is opened first. */
  function folded(title, make, open = false) {
    const body = el("div", { class: "folded" });
    const details = el("details", { open, ontoggle: () => { if (details.open && !body.firstChild) body.append(make()); } },
      el("summary", {}, title), body);
    if (open) body.append(make());
    return details;
  }

  function scroller(label, child) {
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);
  }

  const links = {
    trajectory: (key) => `#/trajectory/${encodeURIComponent(key)}`,
    group: (uid) => `#/group/${encodeURIComponent(uid)}`,
    step: (step) => `#/steps/${step}`,
  };

  return { add, need, el, svg, visible, plain, number, seconds, clock, date, announce, table, folded, scroller, links };
})();
