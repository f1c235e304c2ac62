"use strict";
// A response token by token: coloured by a quantity, walked with the arrow keys, with an inspector of the numbers.
RLFLOW.tokens = (() => {
  const { el, number, visible, plain, table, folded, scroller, quantities } = RLFLOW;
  let chosen = "advantage";

  /** The quantity that the user chose last, or the first that the row has. */
  function quantityFor(row) {
    const options = quantities.available(row);
    return options.find((item) => item.id === chosen) || options.find((item) => item.id === "surprise") || options[0];
  }

  /** Buttons that choose the quantity; `onchange()` after each choice. */
  function chooser(row, onchange) {
    const now = quantityFor(row);
    return el("fieldset", { class: "chooser" }, el("legend", {}, "Colour by"), quantities.available(row).map((item) => el("label", { title: item.help || "" },
      el("input", { type: "radio", name: "quantity", value: item.id, checked: item.id === now.id, onchange: () => { chosen = item.id; onchange(); } }), el("span", {}, item.label))));
  }

  const isMasked = (row, i) => row.response_mask.length > i && !row.response_mask[i];

  function token(row, i, props = {}) {
    const text = i < row.response_tokens.length ? row.response_tokens[i] : `[${row.response_ids[i]}]`;
    return el("span", { class: `tok${isMasked(row, i) ? " masked" : ""}`, ...props }, text === "" ? el("span", { class: "esc" }, "∅") : tokenNodes(text));
  }

  /** Line breaks inside a token are shown and made. */
  function tokenNodes(text) {
    return text.split("\n").flatMap((part, i) => i ? [el("span", { class: "nl", "aria-hidden": "true" }, "⏎"), "\n", ...visible(part, true)] : visible(part, true));
  }

  /** Colours the elements of a row by the chosen quantity; `rows` share the scale. */
  function paintAll(nodes, row, quantity, most) {
    const values = quantity.of(row) || [];
    nodes.forEach((node, i) => quantities.paint(node, quantity, values[i], most));
  }

  /** A response without a cursor, for groups. */
  function strip(row, quantity, most) {
    const nodes = row.response_ids.map((_, i) => token(row, i));
    paintAll(nodes, row, quantity, most);
    return el("div", { class: "tokens strip", dir: "auto" }, nodes);
  }

  /** The whole view of a trajectory's response. `peers` share its colour scale. */
  function view(row, peers) {
    const shown = quantities.shown(row);
    const count = row.response_ids.length;
    const nodes = row.response_ids.map((_, i) => token(row, i, { id: `tok-${i}`, role: "option", "aria-selected": "false", "data-i": i }));
    const box = el("div", { class: "tokens", tabindex: "0", role: "listbox", "aria-orientation": "horizontal", "aria-label": `Response, ${count} tokens. Arrow keys read them.`, dir: "auto" }, nodes);
    const legend = el("div", { class: "legend-holder" });
    const values = shown.map((item) => el("dd", {}));
    const title = el("p", { class: "inspector-title" });
    const inspector = el("div", { class: "inspector" }, title, el("dl", {}, shown.map((item, k) => el("div", {}, el("dt", { title: item.help }, item.label), values[k]))));
    let selected = null;

    function inspect(i) {
      if (i === null) { title.replaceChildren(el("span", { class: "hint" }, count ? "Point at a token, or use the arrow keys." : "The response is empty.")); values.forEach((node) => { node.textContent = "–"; }); return; }
      const name = i < row.response_tokens.length ? plain(row.response_tokens[i]) : "";
      title.replaceChildren(el("b", { class: "mono" }, `“${name}”`), el("span", {}, `#${i}, id ${row.response_ids[i]}, ${isMasked(row, i) ? "left out of the loss" : "trains"}`));
      shown.forEach((item, k) => { values[k].textContent = number(item.values[i]); });
    }

    function select(i, speak) {
      if (selected !== null) nodes[selected].setAttribute("aria-selected", "false");
      selected = i;
      inspect(i);
      if (i === null) { box.removeAttribute("aria-activedescendant"); return; }
      nodes[i].setAttribute("aria-selected", "true");
      box.setAttribute("aria-activedescendant", nodes[i].id);
      if (speak) {
        const quantity = quantityFor(row);
        const value = (quantity.of(row) || [])[i];
        nodes[i].setAttribute("aria-label", `token ${i}: ${plain(row.response_tokens[i] || "")}${value === undefined ? "" : `, ${quantity.label} ${number(value)}`}`);
        nodes[i].scrollIntoView({ block: "nearest" });
      }
    }

    /** The token above or below the selected one on the screen. */
    function vertical(direction) {
      const here = nodes[selected].getClientRects()[0];
      let best = null;
      let distance = Infinity;
      nodes.forEach((node, i) => {
        const rect = node.getClientRects()[0];
        if (!rect || (rect.top - here.top) * direction < here.height / 2) return;
        const far = Math.abs(rect.top - here.top) * 1000 + Math.abs(rect.left - here.left);
        if (far < distance) { distance = far; best = i; }
      });
      return best === null ? selected : best;
    }

    const at = (event) => { const node = event.target.closest("[data-i]"); return node ? Number(node.dataset.i) : null; };
    box.addEventListener("pointerover", (event) => { const i = at(event); if (i !== null) inspect(i); });
    box.addEventListener("pointerleave", () => inspect(selected));
    box.addEventListener("click", (event) => { const i = at(event); if (i !== null) select(i, false); });
    box.addEventListener("focus", () => { if (selected === null && count && box.matches(":focus-visible")) select(0, true); });
    box.addEventListener("keydown", (event) => {
      if (!count) return;
      const now = selected === null ? 0 : selected;
      const moves = { ArrowLeft: () => now - 1, ArrowRight: () => now + 1, Home: () => 0, End: () => count - 1, ArrowUp: () => selected === null ? 0 : vertical(-1), ArrowDown: () => selected === null ? 0 : vertical(1) };
      if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) { select(Math.max(0, Math.min(count - 1, moves[event.key]())), true); event.preventDefault(); }
    });

    function paint() {
      const quantity = quantityFor(row);
      const most = quantities.scale(quantity, peers);
      paintAll(nodes, row, quantity, most);
      legend.replaceChildren(quantities.legend(quantity, most));
    }
    paint();
    inspect(null);
    const columns = [["#", "num"], ["token", "mono"], ["id", "num"], ["mask", "num"], ...shown.map((item) => [item.label, "num"])];
    const rows = () => row.response_ids.map((id, i) => [String(i), visible(row.response_tokens[i] || ""), String(id), isMasked(row, i) ? "0" : "1", ...shown.map((item) => number(item.values[i]))]);
    return el("div", { class: "token-view" }, el("div", { class: "token-main" }, chooser(row, paint), legend, box, folded("All tokens as a table", () => scroller("All tokens", table(columns, rows(), { class: "plain tight" })))), inspector);
  }

  return { view, strip, chooser, quantityFor, tokenNodes };
})();
