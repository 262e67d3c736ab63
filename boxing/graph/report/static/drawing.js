// The drawing of one plan: it opens and folds, pans and zooms, and is walked through by keys.

/** The graph of one plan, drawn: it lays out what is open, and pans and zooms. */
class Drawing {
  constructor(plan, name, shows) {
    this.model = new Model(plan);
    this.name = name;
    this.shows = shows; // called with this drawing and what is selected: an item, or "m3", a move
    this.selected = null;
    this.now = new Set();
    this.layouts = new Map();
    this.canvas = s("svg", { class: "canvas", tabindex: "0", role: "application", "aria-label": `graph of ${name}: arrows walk, Enter opens, Escape leaves` });
    this.world = s("g");
    this.canvas.append(arrowheads(), this.world);
    this.zoom = d3.zoom().scaleExtent([0.08, 3]).on("zoom", (event) => this.world.setAttribute("transform", event.transform));
    d3.select(this.canvas).call(this.zoom).on("dblclick.zoom", null);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.element = h("div", { class: "graph" }, this.canvas);
  }

  layout(group) {
    const key = `${group} ${this.model.views} ${[...this.model.open].filter((at) => group === null || this.isIn(at, group)).sort().join()}`;
    if (!this.layouts.has(key)) this.layouts.set(key, laid(this, group));
    return this.layouts.get(key);
  }

  isIn(at, group) {
    for (let up = at; up !== null; up = this.model.groups[up].parent) if (up === group) return true;
    return false;
  }

  /** Draw all again, and stay where the reader is. */
  draw() {
    const whole = this.layout(null);
    this.spots = new Map();
    const edges = [], boxes = [];
    this.place(whole, 0, 0, boxes, edges);
    this.world.replaceChildren(...boxes.filter((box) => box.classList.contains("open")), ...edges, ...boxes.filter((box) => !box.classList.contains("open")));
    this.size = whole;
    this.mark();
  }

  place(laidOut, x, y, boxes, edges) {
    for (const item of laidOut.items) {
      const left = x + item.x, top = y + item.y;
      this.spots.set(item.key, { x: left, y: top, w: item.w, h: item.h });
      const open = item.key[0] === "g" && this.model.open.has(Number(item.key.slice(1)));
      boxes.push(item.key[0] === "i" || item.key[0] === "o" ? port(this.model, item, left, top) : box(this.model, item, left, top, open));
      if (open) this.place(item.inside, left + PAD, top + HEAD, boxes, edges);
    }
    for (const edge of laidOut.edges) edges.push(...wire(edge, x, y));
  }

  /** Show which item is selected, what is next to it, and what runs now. */
  mark() {
    for (const each of this.world.querySelectorAll("[data-key]")) {
      const key = each.dataset.key;
      each.classList.toggle("selected", key === this.selected);
      each.classList.toggle("now", this.now.has(key));
      each.setAttribute("aria-selected", key === this.selected);
    }
    for (const each of this.world.querySelectorAll(".wire")) {
      each.classList.toggle("near", each.dataset.tail === this.selected || each.dataset.head === this.selected);
    }
  }

  /** The ops that run now, shown by the items that they are in. */
  running(nodes) {
    this.now = new Set(nodes.map((at) => this.shownFor(at)).filter((key) => key !== null));
    this.mark();
  }

  /** The innermost shown item that a node is in. */
  shownFor(node) {
    for (const group of this.model.around(`n${node}`)) if (!this.model.open.has(group)) return `g${group}`;
    return this.spots?.has(`n${node}`) ? `n${node}` : null;
  }

  fit() {
    const { clientWidth: w, clientHeight: tall } = this.canvas;
    if (!w || !tall) return;
    // What would be too small to read begins at its start instead.
    const scale = Math.min(1.1, Math.max(this.size.w > 2 * this.size.h || w < 600 ? 0.46 : 0.62, Math.min((w - 32) / this.size.w, (tall - 32) / this.size.h)));
    const [x, y] = [[w, this.size.w], [tall, this.size.h]].map(([room, size]) => Math.max(16, (room - size * scale) / 2));
    this.move(d3.zoomIdentity.translate(x, y).scale(scale));
  }

  move(transform) {
    d3.select(this.canvas).call(this.zoom.transform, transform);
  }

  /** Bring an item into the middle, unless it is in sight. */
  centre(key, always = false) {
    const spot = this.spots.get(key);
    if (!spot) return;
    const now = d3.zoomTransform(this.canvas), { clientWidth: w, clientHeight: tall } = this.canvas;
    const scale = always ? Math.max(now.k, 0.75) : now.k;
    const [x, y] = now.apply([spot.x + Math.min(spot.w, w) / 2, spot.y + Math.min(spot.h, 60) / 2]);
    if (!always && x > 60 && y > 40 && x < w - 60 && y < tall - 40) return;
    this.move(d3.zoomIdentity.translate(w / 2 - (spot.x + spot.w / 2) * scale, tall / 2 - (spot.y + Math.min(spot.h, tall / scale) / 2) * scale).scale(scale));
  }

  toggle(group, open = !this.model.open.has(group)) {
    const key = `g${group}`, before = this.spots.get(key), at = d3.zoomTransform(this.canvas);
    this.model.open[open ? "add" : "delete"](group);
    this.draw();
    const after = this.spots.get(key);
    if (before && after) this.move(d3.zoomIdentity.translate(at.x + (before.x - after.x) * at.k, at.y + (before.y - after.y) * at.k).scale(at.k));
    this.centre(key);
  }

  foldAll() {
    this.model.open = new Set(this.model.first());
    this.draw();
    this.fit();
  }

  /** Open one more level of all that is shown, as long as a screen can hold it. */
  unfold() {
    const shut = [...this.spots.keys()].filter((key) => key[0] === "g" && !this.model.open.has(Number(key.slice(1))));
    shut.forEach((key) => this.model.open.add(Number(key.slice(1))));
    this.draw();
    this.fit();
  }

  setViews(shown) {
    this.model.views = shown;
    this.draw();
  }

  /** Open what is around an item, select it, and bring it into sight. */
  reveal(key) {
    if (key[0] === "n" && this.model.hidden(Number(key.slice(1)))) this.setViews(true);
    const shut = this.model.around(key).filter((group) => !this.model.open.has(group));
    shut.forEach((group) => this.model.open.add(group));
    if (shut.length) this.draw();
    this.select(key);
    this.centre(key, true);
  }

  /** The same of another plan, by its name. */
  revealAlike(thing) {
    const names = thing.key[0] === "n" ? this.model.nodes.map((_, at) => this.model.name(at)) : this.model.groups.map((group) => group.path || group.title);
    const at = names.indexOf(thing.text);
    if (at >= 0) this.reveal(`${thing.key[0]}${at}`);
  }

  select(key) {
    this.selected = key;
    this.mark();
    this.shows(this, key);
  }

  click(event) {
    const found = event.target.closest("[data-key]"), key = found?.dataset.key;
    if (!key || key[0] === "i" || key[0] === "o") return;
    const group = key[0] === "g" ? Number(key.slice(1)) : null;
    const move = event.target.closest("[data-move]");
    if (group !== null && !move) this.toggle(group);
    this.select(key);
    if (move) this.shows(this, `m${move.dataset.move}`);
  }

  key(event) {
    const steps = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    if (event.key in steps) this.step(...steps[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.selected) {
      if (this.selected[0] === "g") this.toggle(Number(this.selected.slice(1)));
      this.shows(this, this.selected, event.key === "Enter" && this.selected[0] === "n");
    } else if (event.key === "Escape" && this.selected) this.leave();
    else if (event.key === "+" || event.key === "=") d3.select(this.canvas).call(this.zoom.scaleBy, 1.25);
    else if (event.key === "-") d3.select(this.canvas).call(this.zoom.scaleBy, 0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }

  /** One level up: fold the group around what is selected; at the top select nothing. */
  leave() {
    const group = this.selected[0] === "n" || this.selected[0] === "g" ? this.model.groupOf(this.selected) : null;
    const own = this.selected[0] === "g" && this.model.open.has(Number(this.selected.slice(1)));
    if (own) this.toggle(Number(this.selected.slice(1)), false);
    else if (group !== null) {
      this.toggle(group, false);
      this.select(`g${group}`);
    } else this.select(null);
  }

  /** To the nearest item in a direction. */
  step(dx, dy) {
    const spots = [...this.spots].filter(([key]) => key[0] === "g" || key[0] === "n");
    const from = this.spots.get(this.selected);
    if (!from) return this.select(spots[0][0]);
    const middle = (spot, key) => [spot.x + spot.w / 2, key[0] === "g" && this.model.open.has(Number(key.slice(1))) ? spot.y + HEAD / 2 : spot.y + spot.h / 2];
    const [x, y] = middle(from, this.selected);
    let best = null, least = Infinity;
    for (const [key, spot] of spots) {
      if (key === this.selected) continue;
      const [a, b] = middle(spot, key), along = (a - x) * dx + (b - y) * dy, across = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      if (along > 1 && along + 2.5 * across < least) [best, least] = [key, along + 2.5 * across];
    }
    if (best === null) return undefined;
    this.select(best);
    return this.centre(best);
  }
}
