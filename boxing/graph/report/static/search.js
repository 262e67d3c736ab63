// The search: a field that finds all that has a name.

const MOST = 14;

/** A field that finds ops, modules, moves and lines by any part of their words. */
class Search {
  constructor(drawings) {
    [this.drawing, ...this.others] = drawings;
    this.at = 0;
    this.field = h("input", { type: "search", placeholder: "search ops, modules, lines, moves", "aria-label": "search", autocomplete: "off", spellcheck: "false", role: "combobox", "aria-expanded": "false" });
    this.list = h("ul", { class: "found", role: "listbox", hidden: true });
    this.element = h("div", { class: "search" }, this.field, h("kbd", {}, "/"), this.list);
    this.field.addEventListener("input", () => this.look());
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("blur", () => setTimeout(() => this.close(), 150));
  }

  /** Every thing that can be found: its key, what is shown of it, and what is searched. */
  get things() {
    const model = this.drawing.model;
    this.known ??= [
      ...model.groups.map((group, at) => ({ key: `g${at}`, kind: group.kind, text: group.path || group.title, words: `${group.title} ${group.path}` })),
      ...model.nodes.map((node, at) => ({ key: `n${at}`, kind: node.kind, text: model.name(at), words: [model.name(at), node.op, model.text(node.module), model.text(node.line), ...(node.parameters ?? []).map((each) => model.text(each[0]))].join(" ") })),
      ...model.plan.moves.map((row, at) => ({ key: `m${at}`, kind: row.direction, text: `${row.name}: ${row.route}`, words: [row.name, row.route, ...row.members].join(" ") })),
    ].map((thing) => ({ ...thing, words: thing.words.toLowerCase() }));
    return this.known;
  }

  look() {
    const parts = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = parts.length ? this.things.filter((thing) => parts.every((part) => thing.words.includes(part))) : [];
    this.at = 0;
    this.show(parts.length > 0);
  }

  show(asked) {
    const rows = this.hits.slice(0, MOST).map((thing, k) => h("li", { role: "option", class: k === this.at ? "at" : null, onmousedown: () => this.take(thing) }, h("i", {}, thing.kind), thing.text));
    if (this.hits.length > MOST) rows.push(h("li", { class: "pale" }, `and ${this.hits.length - MOST} more`));
    if (asked && !this.hits.length) rows.push(h("li", { class: "pale" }, "nothing of this name"));
    this.list.replaceChildren(...rows);
    this.list.hidden = !rows.length;
    this.field.setAttribute("aria-expanded", !this.list.hidden);
  }

  key(event) {
    const many = Math.min(MOST, this.hits?.length ?? 0);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      this.at = many ? (this.at + (event.key === "ArrowDown" ? 1 : many - 1)) % many : 0;
      this.show(true);
    } else if (event.key === "Enter" && many) this.take(this.hits[this.at]);
    else if (event.key === "Escape") {
      this.field.value = "";
      this.close();
      this.drawing.canvas.focus();
    } else return;
    event.preventDefault();
  }

  take(thing) {
    if (thing.key[0] === "m") {
      const home = this.drawing.model.nodes.findIndex((node) => node.moves?.includes(Number(thing.key.slice(1))));
      if (home >= 0) this.drawing.reveal(`n${home}`);
      this.drawing.shows(this.drawing, thing.key);
    } else {
      this.others.forEach((other) => other.revealAlike(thing));
      this.drawing.reveal(thing.key);
    }
    this.close();
    this.drawing.canvas.focus();
  }

  close() {
    this.list.hidden = true;
    this.field.setAttribute("aria-expanded", false);
  }
}
