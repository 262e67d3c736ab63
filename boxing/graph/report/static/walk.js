// The page of a report: the graph to walk through, what is behind each op and move, memory and schedules over time.
//
//   words      figures and elements       model      the graph as it is folded now, its edges lifted to what is shown
//   drawing    layout and SVG             details    what is known of an op, a move, a group, a task
//   finding    search                     charts     memory and schedules          tables, differences, start
"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const APP = document.getElementById("app");

  // ------------------------------------------------------------------------------------------------ words

  const SVG = "http://www.w3.org/2000/svg";

  /** An element: attributes by name, `on...` as listeners, children as elements or text. */
  function h(tag, look = {}, ...inside) {
    return dressed(document.createElement(tag), look, inside);
  }

  /** The same in SVG. */
  function s(tag, look = {}, ...inside) {
    return dressed(document.createElementNS(SVG, tag), look, inside);
  }

  function dressed(made, look, inside) {
    for (const [name, value] of Object.entries(look)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...inside.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== ""));
    return made;
  }

  const three = (x) => String(Number(x.toPrecision(3)));

  function volume(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1024;
    return `${three(bytes)} ${units[at]}`;
  }

  function duration(seconds) {
    const size = Math.abs(seconds);
    if (size < 999.5e-6) return `${three(seconds * 1e6)} us`;
    return size < 0.9995 ? `${three(seconds * 1e3)} ms` : `${three(seconds)} s`;
  }

  const signed = (seconds) => (seconds > 0 ? "+" : seconds < 0 ? "−" : "±") + duration(Math.abs(seconds));
  const percent = (share) => (share >= 0.01 ? `${Math.round(share * 100)} %` : `${Number((share * 100).toPrecision(1))} %`);
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const some = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const sum = (of) => of.reduce((a, b) => a + b, 0);

  // ------------------------------------------------------------------------------------------------ model

  /** A plan's graph. Items are called "g3" (a group) and "n5" (a node); the whole is null. */
  class Model {
    constructor(plan) {
      this.plan = plan;
      this.texts = plan.texts;
      this.groups = plan.groups.map(([title, path, parent, kind, times]) => ({ title, path, parent, kind, times }));
      this.nodes = plan.nodes;
      this.kids = new Map([[null, []]]);
      this.groups.forEach((_, at) => this.kids.set(at, []));
      this.nodes.forEach((node, at) => this.firstOf(node.group, `n${at}`));
      this.groups.forEach((group, at) => (group.inside = this.below(at)));
      this.views = false;
      this.open = new Set(this.first());
      this.known = new Map();
      this.into = this.nodes.map(() => []);
      this.out = this.nodes.map(() => []);
      for (const edge of plan.edges) {
        this.out[edge[0]].push(edge);
        this.into[edge[1]].push(edge);
      }
    }

    /** Put an item among those of its group, and the group among its parent's when it is first met. */
    firstOf(group, item) {
      const list = this.kids.get(group);
      if (!list.length && group !== null) this.firstOf(this.groups[group].parent, `g${group}`);
      list.push(item);
    }

    below(group) {
      return this.kids.get(group).flatMap((item) => (item[0] === "n" ? [Number(item.slice(1))] : this.below(Number(item.slice(1)))));
    }

    /** The groups that are open at first: those around blocks that stand for others, unless there are very many. */
    first() {
      const found = new Set();
      const stages = this.groups.filter((group) => group.kind === "stage").length;
      this.groups.forEach((group) => {
        if (group.kind !== "block") return;
        for (let up = group.parent; up !== null; up = this.groups[up].parent) {
          if (this.groups[up].kind !== "stage" || stages <= 8) found.add(up);
        }
      });
      if (!found.size) this.kids.get(null).filter((item) => item[0] === "g" && this.kids.get(null).length < 6)
        .forEach((item) => found.add(Number(item.slice(1))));
      return found;
    }

    groupOf(item) {
      const at = Number(item.slice(1));
      return item[0] === "n" ? this.nodes[at].group : this.groups[at].parent;
    }

    /** The groups around an item, the outermost first. */
    around(item) {
      const found = [];
      for (let up = this.groupOf(item); up !== null; up = this.groups[up].parent) found.unshift(up);
      return found;
    }

    hidden(at) {
      return !this.views && Boolean(this.nodes[at].view);
    }

    /** The items of a group that are shown. */
    items(group) {
      return this.kids.get(group).filter((item) =>
        item[0] === "n" ? !this.hidden(Number(item.slice(1))) : this.groups[Number(item.slice(1))].inside.some((at) => !this.hidden(at)));
    }

    /** All edges between nodes that are shown: views between them are passed through. */
    get edges() {
      const key = `edges ${this.views}`;
      if (!this.known.has(key)) {
        const made = [];
        for (const [tail, head, sig] of this.plan.edges) {
          if (this.hidden(head)) continue;
          const from = this.source(tail);
          if (from !== null && from !== head) made.push([from, head, sig]);
        }
        this.known.set(key, made);
      }
      return this.known.get(key);
    }

    source(at) {
      while (this.hidden(at)) {
        const tails = new Set(this.into[at].map((edge) => edge[0]));
        if (tails.size !== 1) return null;
        [at] = tails;
      }
      return at;
    }

    /** The item of a group that a node is in; null where it is outside. */
    itemIn(group, node) {
      let item = `n${node}`;
      for (let up = this.nodes[node].group; ; up = this.groups[up].parent) {
        if (up === group) return item;
        if (up === null) return null;
        item = `g${up}`;
      }
    }

    /** The edges between the items of a group, and what enters and leaves it: [tail, head, signatures]. */
    lifted(group) {
      const key = `lifted ${group} ${this.views}`;
      if (!this.known.has(key)) {
        const made = new Map();
        for (const [tail, head, sig] of this.edges) {
          const from = this.itemIn(group, tail), to = this.itemIn(group, head);
          if (from === to || (from === null && to === null)) continue;
          const a = from ?? `i${tail}`, b = to ?? `o${tail}`;
          const words = made.get(`${a} ${b}`) ?? made.set(`${a} ${b}`, new Set()).get(`${a} ${b}`);
          words.add(this.texts[sig]);
        }
        this.known.set(key, [...made].map(([ends, words]) => [...ends.split(" "), [...words]]));
      }
      return this.known.get(key);
    }

    /** Seconds of all ops of a group, of all that it stands for. */
    seconds(group) {
      return sum(this.groups[group].inside.map((at) => (this.nodes[at].seconds ?? 0) * this.nodes[at].times));
    }

    movesIn(item) {
      const at = Number(item.slice(1));
      const inside = item[0] === "n" ? [at] : this.groups[at].inside;
      return [...new Set(inside.flatMap((node) => this.nodes[node].moves ?? []))];
    }

    /** What an op takes and where its results go, as edges tell. */
    name(at) {
      const node = this.nodes[at];
      const path = node.group === null ? "" : this.groups[node.group].path;
      return path ? `${path} › ${node.label}` : node.label;
    }

    text(at) {
      return at === undefined ? "" : this.texts[at];
    }
  }

  // ------------------------------------------------------------------------------------------------ drawing

  const HEAD = 30, PAD = 14, LETTER = 6.6;

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

  function arrowheads() {
    const head = (id) => s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0 0.5L7.5 4L0 7.5z", class: id }));
    return s("defs", {}, head("tip"), head("tip-near"));
  }

  /** Sizes and places of the items of a group, by dagre; groups that are open are laid out first, by themselves. */
  function laid(drawing, group) {
    const model = drawing.model, items = model.items(group), edges = model.lifted(group);
    const across = group === null && items.some((item) => item[0] === "g" && model.groups[Number(item.slice(1))].kind === "stage");
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    graph.setGraph({ rankdir: across ? "LR" : "TB", nodesep: 22, ranksep: 14, edgesep: 12, ranker: items.length > 150 ? "longest-path" : "network-simplex" });
    graph.setDefaultEdgeLabel(() => ({}));
    const inside = new Map();
    for (const key of items) {
      const at = Number(key.slice(1));
      if (key[0] === "g" && model.open.has(at)) {
        const its = drawing.layout(at);
        inside.set(key, its);
        graph.setNode(key, { width: Math.max(its.w + 2 * PAD, titleWidth(model, at)), height: its.h + HEAD + PAD });
      } else graph.setNode(key, sized(model, key));
    }
    for (const [tail, head] of edges) {
      for (const end of [tail, head]) {
        if (end[0] === "i" || end[0] === "o") graph.setNode(end, { width: Math.min(190, 24 + LETTER * portName(model, end).length), height: 20 });
      }
    }
    for (const [tail, head, words] of edges) {
      const said = cut(words.slice(0, 2).join(", "), 34);
      graph.setEdge(tail, head, { said, width: LETTER * said.length + 8, height: 14, labelpos: "c" });
    }
    dagre.layout(graph);
    const { width, height } = graph.graph();
    return {
      w: Number.isFinite(width) ? width : 0,
      h: Number.isFinite(height) ? height : 0,
      items: graph.nodes().map((key) => {
        const { x, y, width: w, height: tall } = graph.node(key);
        return { key, w, h: tall, x: x - w / 2, y: y - tall / 2, inside: inside.get(key) };
      }),
      edges: graph.edges().map(({ v, w }) => ({ tail: v, head: w, ...graph.edge(v, w) })),
    };
  }

  const titleWidth = (model, at) => 70 + 7.4 * (model.groups[at].title.length + (model.groups[at].times > 1 ? 6 : 0));

  function words(model, key) {
    const at = Number(key.slice(1));
    if (key[0] === "g") {
      const group = model.groups[at], seconds = model.seconds(at);
      const ops = sum(group.inside.map((node) => (model.nodes[node].kind === "op" ? 1 : 0)));
      return [group.title + (group.times > 1 ? ` × ${group.times}` : ""), `${some(ops, "op")}${seconds ? ` · ${duration(seconds)}` : ""}`];
    }
    const node = model.nodes[at];
    if (node.kind === "move") {
      const row = model.plan.moves[(node.moves ?? [])[0]];
      return [node.label, row ? `${volume(row.bytes)} · ${duration(row.seconds)}${node.back ? " · backward" : ""}` : ""];
    }
    const made = node.outputs?.[0];
    return [node.label, made ? `${model.text(made[1])} · ${model.text(made[3])}` : ""];
  }

  function sized(model, key) {
    const [first, second] = words(model, key).map((text) => cut(text, 44));
    const badges = badgesOf(model, key).length;
    const wide = Math.max(7.2 * first.length + 26, LETTER * second.length + 26, badges * 34 + 20, 84);
    return { width: Math.ceil(wide), height: 30 + (second ? 16 : 0) + (badges ? 20 : 0) };
  }

  /** A move in a few letters: those of its first collective, with a mark if it is of the backward or the update. */
  function shortName(row) {
    const kind = row.route.split(" ")[0];
    return `${DATA.short[kind] ?? kind}${row.direction === "backward" || row.direction === "update" ? "'" : ""}`;
  }

  /** The kinds of moves at an op or inside of a group, each with how many there are. */
  function badgesOf(model, key) {
    if (key[0] === "n" && model.nodes[Number(key.slice(1))].kind !== "op") return [];
    const found = new Map();
    for (const at of model.movesIn(key)) {
      const row = model.plan.moves[at], name = shortName(row);
      if (!found.has(name)) found.set(name, { name, look: row.look, back: name.endsWith("'"), move: at });
    }
    return [...found.values()].slice(0, 5);
  }

  function box(model, item, x, y, open) {
    const at = Number(item.key.slice(1)), node = item.key[0] === "n" ? model.nodes[at] : null, group = node ? null : model.groups[at];
    const kind = node ? node.kind : group.kind;
    const [first, second] = words(model, item.key);
    const look = node?.kind === "move" ? ` look-${node.look}${node.back ? " back" : ""}` : node?.view ? " view" : "";
    const made = s("g", { class: `box ${node ? "node" : "group"} ${kind}${look}${open ? " open" : ""}`, "data-key": item.key, transform: `translate(${x} ${y})`, role: "img", "aria-label": `${first}, ${second}` });
    const seconds = node ? (node.seconds ?? 0) * node.times : model.seconds(at);
    made.append(s("title", {}, node ? model.name(at) : group.path || group.title));
    if (group && !open) made.append(s("rect", { class: "behind", x: 4, y: 4, width: item.w, height: item.h, rx: 9 }));
    made.append(s("rect", { class: "ground", width: item.w, height: item.h, rx: kind === "move" || kind === "input" || kind === "result" ? Math.min(16, item.h / 2) : 9 }));
    if (open) {
      made.append(s("text", { x: 12, y: 20, class: "title" }, `▾ ${first}`));
      made.append(s("text", { x: item.w - 12, y: 20, class: "second", "text-anchor": "end" }, item.w > titleWidth(model, at) + 90 ? second : ""));
      return made;
    }
    made.append(s("text", { x: item.w / 2, y: 20, class: "title", "text-anchor": "middle" }, cut((group ? "▸ " : "") + first, 46)));
    if (second) made.append(s("text", { x: item.w / 2, y: 36, class: "second", "text-anchor": "middle" }, cut(second, 44)));
    const badges = badgesOf(model, item.key);
    let left = (item.w - badges.length * 34 + 4) / 2;
    for (const badge of badges) {
      made.append(s("g", { class: `badge look-${badge.look}${badge.back ? " back" : ""}`, "data-move": badge.move, transform: `translate(${left} ${item.h - 22})` },
        s("title", {}, model.plan.moves[badge.move].route), s("rect", { width: 30, height: 15, rx: 7.5 }), s("text", { x: 15, y: 11, "text-anchor": "middle" }, badge.name)));
      left += 34;
    }
    const whole = sum(model.nodes.map((each) => (each.seconds ?? 0) * each.times));
    if (seconds && whole) made.append(s("rect", { class: "heat", x: 8, y: item.h - 3, width: Math.max(1, (item.w - 16) * (seconds / whole)), height: 3, rx: 1.5 }));
    return made;
  }

  const portName = (model, key) => cut(model.nodes[Number(key.slice(1))].label, 26);

  function port(model, item, x, y) {
    const name = portName(model, item.key), from = Number(item.key.slice(1));
    return s("g", { class: "port", "data-key": item.key, transform: `translate(${x} ${y})` },
      s("title", {}, `${item.key[0] === "i" ? "from" : "to what is outside:"} ${model.name(from)}`),
      s("rect", { width: item.w, height: item.h, rx: 10 }), s("text", { x: item.w / 2, y: 14, "text-anchor": "middle" }, name));
  }

  function wire(edge, x, y) {
    const points = edge.points.map((point) => [point.x + x, point.y + y]);
    let way = `M${points[0].map((each) => each.toFixed(1))}`;
    for (let k = 1; k < points.length - 1; k += 1) {
      const middle = [0, 1].map((d) => (points[k][d] + points[k + 1][d]) / 2);
      const [a, b] = k === points.length - 2 ? [points[k], points[k + 1]] : [points[k], middle];
      way += `Q${a.map((each) => each.toFixed(1))} ${b.map((each) => each.toFixed(1))}`;
    }
    if (points.length === 2) way += `L${points[1].map((each) => each.toFixed(1))}`;
    const made = [s("path", { class: "wire", d: way, "data-tail": edge.tail, "data-head": edge.head })];
    if (edge.said && Number.isFinite(edge.x)) made.push(s("text", { class: "sig", x: edge.x + x, y: edge.y + y + 4, "text-anchor": "middle" }, edge.said));
    return made;
  }

  // ------------------------------------------------------------------------------------------------ details

  const chip = (text, look, back = false) => h("span", { class: `chip look-${look}${back ? " back" : ""}` }, text);

  /** The panel beside the drawing. */
  class Panel {
    constructor() {
      this.element = h("aside", { class: "panel", "aria-live": "polite", tabindex: "-1", "aria-label": "details" });
      this.element.addEventListener("keydown", (event) => {
        if (event.key === "Escape") this.drawing?.canvas.focus();
      });
      this.back = [];
      this.hint();
    }

    hint() {
      const keys = [["/", "search"], ["Tab", "to the graph"], ["arrows", "walk"], ["Enter", "open, or go to details"], ["Esc", "fold, leave"], ["+ − 0", "zoom, fit"]];
      this.element.replaceChildren(h("h2", {}, "Walk through"), h("p", { class: "pale" }, "Click a box to open it, an op or a coloured move to see what is behind it."),
        h("dl", { class: "keys" }, keys.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), legend());
    }

    show(drawing, key, focus = false) {
      this.drawing = drawing;
      if (key === null) return this.hint();
      const at = Number(key.slice(1));
      const made = { n: () => nodeDetails, g: () => groupDetails, m: () => moveDetails, t: () => taskDetails }[key[0]]()(drawing, at);
      this.element.replaceChildren(...made.flat().filter(Boolean));
      this.element.scrollTop = 0;
      if (focus) this.element.focus();
      return undefined;
    }
  }

  function legend() {
    return h("div", { class: "legend" }, Object.entries(DATA.families).map(([look, kinds]) => chip(kinds.slice(0, 3).map((kind) => kind.replaceAll("_", " ")).join(", "), look)),
      h("p", { class: "pale" }, "A dashed border, or ' behind a name: of the backward or the update."));
  }

  /** A button to an item or a move. */
  function link(drawing, key, text) {
    return h("button", { class: "link", onclick: () => (key[0] === "m" ? drawing.shows(drawing, key) : drawing.reveal(key)) }, text);
  }

  function crumbs(drawing, key) {
    const model = drawing.model, groups = model.around(key);
    return h("nav", { class: "crumbs" }, groups.map((group) => [link(drawing, `g${group}`, model.groups[group].title), " › "]));
  }

  const section = (title, ...inside) => (inside.flat().filter(Boolean).length ? [h("h3", {}, title), ...inside.flat()] : []);

  function grid(heads, rows, look = "") {
    return h("div", { class: "wide" }, h("table", { class: look }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { class: head[0] === ">" ? "n" : null }, head.replace(">", ""))))),
      h("tbody", {}, rows)));
  }

  function cells(values, look = {}) {
    return h("tr", look, values.map((value) => (value instanceof Node ? h("td", {}, value) : typeof value === "object" && value !== null ? h("td", { class: "n" }, value.n) : h("td", {}, value))));
  }

  function tensors(model, list) {
    return list?.length ? [grid(["name", "shape", "signature"], list.map(([name, shape, dtype, sig]) =>
      cells([h("span", { class: "name", title: model.text(name) }, model.text(name).split(".").slice(-2).join(".")), h("span", {}, model.text(shape), " ", h("i", { class: "pale" }, model.text(dtype))), h("code", {}, model.text(sig))])))] : [];
  }

  function moveLink(drawing, at) {
    const row = drawing.model.plan.moves[at];
    return h("button", { class: "row", onclick: () => drawing.shows(drawing, `m${at}`) },
      h("span", { title: row.route }, chip(shortName(row), row.look, row.direction !== "forward"), ` ${row.name}`), h("span", {}, `${volume(row.bytes)} · ${duration(row.seconds)}`));
  }

  function nodeDetails(drawing, at) {
    const model = drawing.model, node = model.nodes[at], plan = model.plan;
    const own = node.moves ?? [];
    if (node.kind === "move" && own.length) {
      return [crumbs(drawing, `n${at}`), ...moveDetails(drawing, own[0], at), ...section("Also here", own.slice(1).map((move) => moveLink(drawing, move)))];
    }
    const line = model.text(node.line), back = node.backward ? `, ${duration(node.backward)} of it in the backward` : "";
    const near = (edges, end) => [...new Set(edges.map((edge) => edge[end]))].map((other) => link(drawing, `n${other}`, model.name(other)));
    return [
      crumbs(drawing, `n${at}`),
      h("h2", {}, node.label, node.times > 1 ? h("span", { class: "times" }, `× ${node.times}`) : null),
      line ? h("p", { class: "line" }, h("code", {}, line)) : null,
      node.seconds ? h("p", {}, h("b", {}, duration(node.seconds)), `${back}${node.times > 1 ? `; ${duration(node.seconds * node.times)} of all ${node.times}` : ""}`) : null,
      node.recomputed ? h("p", { class: "pale" }, "Run again in the backward.") : null,
      ...(node.why !== undefined ? section("Why this signature", h("p", { class: "why" }, model.text(node.why))) : []),
      ...section("Takes", ...tensors(model, node.inputs)),
      ...section("Makes", ...tensors(model, node.outputs)),
      ...section("Parameters", ...tensors(model, node.parameters)),
      ...section("Moves here", own.map((move) => moveLink(drawing, move))),
      ...(node.candidates !== undefined ? candidates(model, plan.tables[node.candidates]) : []),
      ...section("Comes from", near(model.into[at], 0)),
      ...section("Goes to", near(model.out[at], 1)),
    ];
  }

  const FEW = 10;

  function candidates(model, rows) {
    const made = rows.map(([sig, own, more, chosen], k) =>
      cells([h("code", {}, model.text(sig)), { n: duration(own) }, { n: chosen ? "chosen" : signed(more) }], { class: (chosen ? "chosen" : "") + (k >= FEW && !chosen ? " more" : "") }));
    const table = grid(["signature", ">its own", ">a step"], made, "candidates");
    const all = rows.length > FEW ? h("button", { class: "plain", onclick: (event) => {
      table.classList.add("all");
      event.target.remove();
    } }, `show all ${rows.length}`) : null;
    return section(`${some(rows.length, "candidate")}, cheapest first`, table, all);
  }

  function groupDetails(drawing, at) {
    const model = drawing.model, group = model.groups[at], seconds = model.seconds(at);
    const ops = group.inside.filter((node) => model.nodes[node].kind === "op").sort((a, b) => (model.nodes[b].seconds ?? 0) - (model.nodes[a].seconds ?? 0));
    const held = group.inside.reduce((n, node) => n + (model.nodes[node].parameters?.length ?? 0), 0);
    return [
      crumbs(drawing, `g${at}`),
      h("h2", {}, group.title, group.times > 1 ? h("span", { class: "times" }, `× ${group.times}`) : null),
      h("p", { class: "pale" }, group.path),
      h("p", {}, h("b", {}, duration(seconds)), ` in ${some(ops.length, "op")}${group.times > 1 ? ` of each of ${group.times} equal blocks` : ""}, ${some(held, "parameter")}`),
      ...section("Its dearest ops", ops.slice(0, 8).filter((node) => model.nodes[node].seconds).map((node) =>
        h("button", { class: "row", onclick: () => drawing.reveal(`n${node}`) }, h("span", {}, model.name(node).replace(`${group.path}.`, "")), h("span", {}, duration(model.nodes[node].seconds))))),
      ...section("Moves inside", model.movesIn(`g${at}`).slice(0, 24).map((move) => moveLink(drawing, move))),
    ];
  }

  /** Who waits for a move: those that read what it brings; of a parameter's gradient, the optimizer. */
  function waiting(drawing, at) {
    const model = drawing.model, row = model.plan.moves[at], found = [];
    model.nodes.forEach((node, n) => {
      if (!node.moves?.includes(at)) return;
      if (node.kind !== "move") found.push(n);
      else if (row.direction === "backward") found.push(...model.into[n].map((edge) => edge[0]));
      else found.push(...model.out[n].map((edge) => edge[1]));
    });
    const who = [...new Set(found)].slice(0, 12).map((n) => link(drawing, `n${n}`, model.name(n)));
    const said = { forward: "", again: "The backward of", backward: "", update: "The next step's" }[row.direction];
    const trained = row.direction === "backward" && found.some((n) => model.nodes[n].parameters?.length && model.nodes[n].moves?.includes(at));
    return section("Who waits for it", trained ? h("p", {}, "The optimizer, at the end of the backward; it is made behind the backward of") : said ? h("p", {}, said) : null, who);
  }

  function moveDetails(drawing, at) {
    const model = drawing.model, row = model.plan.moves[at], each = row.count > 1 ? " each" : "";
    const figures = [["the busiest rank receives", volume(row.bytes) + each], ["all ranks send", volume(row.total) + each], ["time", duration(row.seconds) + each], ...(row.count > 1 ? [["times", `${row.count}, ${duration(row.seconds * row.count)} in all`]] : []), ...(row.once ? [["when", "once a step"]] : [])];
    return [
      h("h2", {}, chip(row.route, row.look, row.direction !== "forward")),
      h("p", {}, `${row.direction} of `, h("b", {}, row.name)),
      h("p", {}, h("code", {}, model.text(row.change))),
      row.line !== undefined && model.text(row.line) ? h("p", { class: "line" }, h("code", {}, model.text(row.line))) : null,
      h("dl", { class: "figures small" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      ...section("Its route and links", row.steps.map(([kind, look, to, bytes, seconds, over]) =>
        h("div", { class: "step" }, chip(kind, look), h("span", {}, " to ", h("code", {}, to)), h("div", { class: "pale" }, `${bytes ? `${volume(bytes)}, ${duration(seconds)}` : "nothing sent"}${over ? `; ${over}` : ""}`)))),
      ...waiting(drawing, at),
      ...(row.members.length > 1 ? section("It carries", h("p", { class: "pale" }, `${row.members.join(", ")}${row.members.length === 12 ? ", …" : ""}`)) : []),
    ];
  }

  function taskDetails(drawing, at) {
    const model = drawing.model, task = drawing.tasks[at], nodes = [...new Set(task.chunks.flatMap((chunk) => model.plan.chunks[chunk] ?? []))];
    const dear = nodes.filter((n) => model.nodes[n].seconds).sort((a, b) => model.nodes[b].seconds - model.nodes[a].seconds);
    return [
      h("h2", {}, task.name),
      h("p", {}, `${task.schedule}, on ${task.queue}: ${duration(task.start)} to ${duration(task.end)}, `, h("b", {}, duration(task.end - task.start))),
      ...section(`Its ${some(nodes.length, "op")}${dear.length ? ", the dearest first" : ""}`, dear.slice(0, 20).map((n) =>
        h("button", { class: "row", onclick: () => drawing.reveal(`n${n}`) }, h("span", {}, model.name(n)), h("span", {}, duration(model.nodes[n].seconds))))),
    ];
  }

  // ------------------------------------------------------------------------------------------------ finding

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

  // ------------------------------------------------------------------------------------------------ charts

  const KINDS = ["parameters", "states", "gradients", "activations"];

  function key(names) {
    return h("div", { class: "key" }, names.map((name) => h("span", {}, h("i", { style: `background:var(--${name})` }), name)));
  }

  /** Memory of the fullest rank over the step, with a slider; below it all ranks at their fullest. */
  function memoryCard(drawing) {
    const { memory, course } = drawing.model.plan;
    if (!memory) return h("section", { class: "card" }, h("h2", {}, "Memory"), h("p", { class: "pale" }, "Unknown."));
    return h("section", { class: "card memory" }, h("h2", {}, "Memory"), key(KINDS), course ? overTime(drawing, course, memory.limit) : null, rankBars(memory),
      memory.notes.map((note) => h("p", { class: "pale" }, note)));
  }

  function overTime(drawing, course, limit) {
    const many = course.activations.length, W = 600, H = 150;
    const layers = { parameters: Array(many).fill(course.parameters), states: Array(many).fill(course.states), gradients: course.gradients, activations: course.activations };
    const total = (k) => sum(KINDS.map((kind) => layers[kind][k]));
    const totals = Array.from({ length: many }, (_, k) => total(k)), peak = totals.indexOf(Math.max(...totals));
    const top = Math.max(totals[peak], limit && limit < 2 * totals[peak] ? limit : 0) * 1.04, step = W / Math.max(1, many);
    const plot = s("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": "memory over the step" });
    let low = Array(many).fill(0);
    for (const kind of KINDS) {
      const high = low.map((bytes, k) => bytes + layers[kind][k]), y = (bytes) => (H - (bytes / top) * H).toFixed(1);
      const up = high.map((bytes, k) => `${(k * step).toFixed(1)} ${y(bytes)}L${((k + 1) * step).toFixed(1)} ${y(bytes)}`).join("L");
      const down = low.map((bytes, k) => `${((k + 1) * step).toFixed(1)} ${y(bytes)}L${(k * step).toFixed(1)} ${y(bytes)}`).reverse().join("L");
      plot.append(s("path", { d: `M${up}L${down}z`, style: `fill:var(--${kind})` }));
      low = high;
    }
    if (limit && limit <= top) plot.append(s("path", { class: "limit", d: `M0 ${H - (limit / top) * H}H${W}` }));
    const cursor = s("path", { class: "cursor" }), said = h("p", { class: "said", "aria-live": "polite" });
    plot.append(cursor);
    const slider = h("input", { type: "range", min: 0, max: many - 1, value: peak, class: "slider", "aria-label": "moment of the step" });
    const at = (light) => {
      const k = Number(slider.value), x = (k + 0.5) * step;
      cursor.setAttribute("d", `M${x} 0V${H}`);
      said.replaceChildren(h("b", {}, volume(totals[k])), k === peak ? " at the peak, " : " ", drawing.model.text(course.tasks[k]), h("br"), h("span", { class: "pale" }, KINDS.map((kind) => `${kind} ${volume(layers[kind][k])}`).join(", ")));
      slider.setAttribute("aria-valuetext", `${volume(totals[k])}, ${drawing.model.text(course.tasks[k])}`);
      if (light) drawing.running(course.nodes[k]);
    };
    slider.addEventListener("input", () => at(true));
    plot.addEventListener("pointerdown", (event) => {
      const inside = plot.getBoundingClientRect();
      slider.value = Math.floor(((event.clientX - inside.left) / inside.width) * many);
      at(true);
    });
    at(false);
    return h("div", { class: "over-time" }, h("p", { class: "pale" }, `rank ${course.rank} over the step${limit ? `, of ${volume(limit)}` : ""}`), plot, slider,
      h("div", { class: "line-up" }, said, h("button", { class: "plain", onclick: () => {
        slider.value = peak;
        at(true);
      } }, "to the peak")));
  }

  const RANKS = 8;

  function rankBars(memory) {
    const all = Object.entries(memory.ranks).sort((a, b) => b[1].total - a[1].total), full = Math.max(memory.limit ?? 0, ...all.map(([, held]) => held.total)) || 1;
    const alike = new Map();
    for (const [rank, held] of all) {
      const like = KINDS.map((kind) => held[kind]).join();
      alike.get(like)?.ranks.push(rank) ?? alike.set(like, { ranks: [rank], held });
    }
    const rows = [...alike.values()].slice(0, RANKS).map(({ ranks, held }) => {
      const sizes = KINDS.map((kind) => held[kind]), scale = held.total / (sum(sizes) || 1);
      const over = memory.limit && held.total > memory.limit;
      return [h("span", {}, ranks.length > 1 ? `${ranks.length} ranks, as ${ranks[0]}` : `rank ${ranks[0]}`),
        h("span", { class: "bar" }, KINDS.map((kind, k) => h("i", { title: `${kind}: ${volume(sizes[k])}`, style: `width:${((100 * sizes[k] * scale) / full).toFixed(2)}%;background:var(--${kind})` })),
          memory.limit && memory.limit < full ? h("i", { class: "limit", title: "limit", style: `left:${((100 * memory.limit) / full).toFixed(2)}%` }) : null),
        h("span", { class: over ? "n over" : "n" }, `${volume(held.total)}${memory.limit ? `, ${percent(held.total / memory.limit)}` : ""}${over ? ", too much" : ""}${held.away ? `; on the host ${held.away}` : ""}`)];
    });
    return [h("p", { class: "pale" }, `each rank at its fullest${memory.limit ? `, of ${volume(memory.limit)}` : ""}`), h("div", { class: "ranks" }, rows),
      alike.size > RANKS ? h("p", { class: "pale" }, `and ${alike.size - RANKS} more kinds of ranks with less`) : null];
  }

  /** Schedules below each other, on one scale of time. */
  function scheduleCard(drawing) {
    const { schedules } = drawing.model.plan;
    if (!schedules.length) return null;
    drawing.tasks = [];
    const end = Math.max(...schedules.map((schedule) => schedule.end)) || 1;
    return h("section", { class: "card schedule" }, h("h2", {}, "Schedule"), h("div", { class: "key" }, [["F", "forward"], ["B", "backward"], ["W", "weights' gradients"], ["U", "update"], ["move", "move"]].map(([kind, name]) => h("span", {}, h("i", { class: `task-${kind}` }), name))),
      schedules.map((schedule) => lanes(drawing, schedule, end)));
  }

  function lanes(drawing, schedule, end) {
    const W = 900, ROW = 20, tall = schedule.queues.length * ROW;
    const plot = s("svg", { class: "lanes", viewBox: `0 0 ${W} ${tall}`, preserveAspectRatio: "none", style: `height:${tall}px` });
    schedule.queues.forEach((_, at) => plot.append(s("rect", { class: "lane", x: 0, y: at * ROW + 2, width: W, height: ROW - 4 })));
    schedule.tasks.forEach(([queue, name, kind, start, stop, chunks], k) => {
      const at = drawing.tasks.length, words = drawing.model.text(name);
      drawing.tasks.push({ name: words, queue: schedule.queues[queue], schedule: schedule.name, start, end: stop, chunks });
      plot.append(s("rect", { class: `task task-${kind}`, x: (start / end) * W, y: queue * ROW + 2, width: Math.max(0.6, ((stop - start) / end) * W), height: ROW - 4, "data-task": at, tabindex: k === 0 ? 0 : -1, role: "button", "aria-label": `${words}, ${duration(stop - start)}` },
        s("title", {}, `${words}  ${duration(start)} to ${duration(stop)}`)));
    });
    const take = (bar) => {
      const at = Number(bar.dataset.task);
      plot.closest(".schedule").querySelectorAll(".task.selected").forEach((each) => each.classList.remove("selected"));
      bar.classList.add("selected");
      bar.focus();
      drawing.running([...new Set(drawing.tasks[at].chunks.flatMap((chunk) => drawing.model.plan.chunks[chunk] ?? []))]);
      drawing.shows(drawing, `t${at}`);
    };
    plot.addEventListener("click", (event) => event.target.dataset.task && take(event.target));
    plot.addEventListener("keydown", (event) => {
      const way = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      const next = way ? event.target[way] : event.key === "Enter" ? event.target : null;
      if (!next?.dataset?.task) return;
      take(next);
      event.preventDefault();
    });
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", {}, duration(share * end)));
    return h("div", { class: "lanes-of" }, h("h3", {}, schedule.name, h("span", { class: "pale" }, ` ${duration(schedule.end)}${schedule.left ? `; the first ${schedule.tasks.length} tasks of ${schedule.tasks.length + schedule.left}` : ""}`)),
      h("div", { class: "lanes-grid" }, h("div", { class: "queues" }, schedule.queues.map((queue) => h("span", { title: queue }, queue))), plot), h("div", { class: "ticks" }, ticks));
  }

  // ------------------------------------------------------------------------------------------------ tables

  /** A table that is sorted by its heads: columns are [head, of a row: number or text, how it is shown]. */
  function sortable(columns, rows, picked) {
    const body = h("tbody"), MOSTROWS = 200;
    let by = 0, to = -1, all = false;
    const fill = () => {
      const of = (row) => columns[by][1](row);
      const sorted = [...rows].sort((a, b) => to * (typeof of(a) === "number" ? of(a) - of(b) : String(of(a)).localeCompare(String(of(b)))));
      const shown = all ? sorted : sorted.slice(0, MOSTROWS);
      body.replaceChildren(...shown.map((row) => h("tr", { tabindex: 0, onclick: () => picked(row), onkeydown: (event) => event.key === "Enter" && picked(row) },
        columns.map(([, value, shows]) => h("td", { class: typeof value(row) === "number" ? "n" : null }, shows ? shows(row) : value(row))))));
      if (shown.length < sorted.length) body.append(h("tr", { onclick: () => {
        all = true;
        fill();
      } }, h("td", { colspan: columns.length, class: "pale" }, `show ${sorted.length - shown.length} more`)));
    };
    const heads = columns.map(([name, value], at) => h("th", { class: rows.length && typeof value(rows[0]) === "number" ? "n" : null, scope: "col" }, h("button", { class: "sort", onclick: (event) => {
      to = by === at ? -to : -1;
      by = at;
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      event.target.closest("th").setAttribute("aria-sort", to < 0 ? "descending" : "ascending");
      fill();
    } }, name)));
    fill();
    return rows.length ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body)) : h("p", { class: "pale" }, "None.");
  }

  function tables(drawing) {
    const model = drawing.model, plan = model.plan;
    const numbered = (list) => list.map((row, at) => ({ ...row, at }));
    const moves = () => sortable([
      ["time", (row) => row.seconds * row.count, (row) => duration(row.seconds * row.count)],
      ["bytes a rank", (row) => row.bytes * row.count, (row) => volume(row.bytes * row.count)],
      ["times", (row) => row.count],
      ["direction", (row) => row.direction + (row.once ? ", once" : "")],
      ["value", (row) => row.name],
      ["from, to", (row) => model.text(row.change), (row) => h("code", {}, model.text(row.change))],
      ["route", (row) => row.route, (row) => chip(row.route, row.look, row.direction !== "forward")],
    ], numbered(plan.moves), (row) => {
      const home = model.nodes.findIndex((node) => node.moves?.includes(row.at));
      if (home >= 0) drawing.reveal(`n${home}`);
      drawing.shows(drawing, `m${row.at}`);
      drawing.element.scrollIntoView({ block: "nearest" });
    });
    const ops = () => sortable([
      ["time", (row) => (row.seconds ?? 0) * row.times, (row) => (row.seconds === undefined ? "?" : duration(row.seconds * row.times))],
      ["times", (row) => row.times],
      ["op", (row) => row.op],
      ["module", (row) => model.text(row.module)],
      ["signature", (row) => signature(model, row), (row) => h("code", {}, signature(model, row))],
      ["line", (row) => model.text(row.line), (row) => h("code", {}, model.text(row.line))],
    ], numbered(model.nodes).filter((node) => node.kind === "op"), (row) => {
      drawing.reveal(`n${row.at}`);
      drawing.element.scrollIntoView({ block: "nearest" });
    });
    const layouts = () => {
      const made = h("div", { class: "wide map-of" });
      made.innerHTML = plan.map; // written by the report, with every text escaped
      return made;
    };
    const notes = () => h("dl", { class: "notes" }, plan.notes.flatMap(([word, line]) => [h("dt", {}, word), h("dd", {}, line)]));
    return tabs([[`Moves (${plan.moves.length})`, moves], [`Ops (${model.nodes.filter((node) => node.kind === "op").length})`, ops], ["Layouts of weights", layouts], ["How it is known", notes]]);
  }

  const signature = (model, node) => `${(node.inputs ?? []).map((each) => model.text(each[3])).join(", ")} → ${[...new Set((node.outputs ?? []).map((each) => model.text(each[3])))].join(", ")}`;

  /** Tabs, each filled when it is first shown. */
  function tabs(list) {
    const body = h("div", { role: "tabpanel" }), made = new Map();
    const show = (at, focus) => {
      buttons.forEach((button, k) => {
        button.setAttribute("aria-selected", k === at);
        button.tabIndex = k === at ? 0 : -1;
      });
      if (!made.has(at)) made.set(at, list[at][1]());
      body.replaceChildren(made.get(at));
      if (focus) buttons[at].focus();
    };
    const buttons = list.map(([name], at) => h("button", { role: "tab", onclick: () => show(at), onkeydown: (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (way) show((at + way + list.length) % list.length, true);
    } }, name));
    show(0);
    return h("section", { class: "card tables" }, h("div", { role: "tablist" }, buttons), body);
  }

  // ------------------------------------------------------------------------------------------------ differences

  function differences(diff, drawings) {
    const marks = { same: "", changed: "~", "only a": "−", "only b": "+" };
    const figures = diff.figures.map(([name, a, b, change]) => cells([name, { n: a }, { n: b }, { n: change }]));
    const lines = diff.rows.map(([change, a, b]) => cells([marks[change], h("code", {}, a), h("code", {}, b)], { class: change.replace(" ", "-") }));
    const ops = diff.ops.map(([module, op, times, a, b, sigA, sigB, more]) => ({ module, op, times, nodes: [a, b], sigA, sigB, more }));
    const table = () => sortable([
      ["b takes longer", (row) => row.more * row.times, (row) => signed(row.more * row.times)],
      ["times", (row) => row.times],
      ["module", (row) => row.module],
      ["op", (row) => row.op],
      [diff.names[0], (row) => row.sigA, (row) => h("code", {}, row.sigA)],
      [diff.names[1], (row) => row.sigB, (row) => h("code", {}, row.sigB)],
    ], ops, (row) => row.nodes.forEach((node, k) => node !== null && drawings[k].reveal(`n${node}`)));
    return tabs([
      ["Figures", () => grid(["", `>${diff.names[0]}`, `>${diff.names[1]}`, ">change"], figures)],
      [`Lines (${diff.rows.filter((row) => row[0] !== "same").length} differ)`, () => grid(["", diff.names[0], diff.names[1]], lines, "lines")],
      [`Ops (${ops.length} lie otherwise)`, table],
    ]);
  }

  // ------------------------------------------------------------------------------------------------ start

  const PARTS = { products: "#4c8fdd", attention: "#9a6fe0", "other ops": "#8fb4dc", moves: "#e08a3c", optimizer: "#3fae83", "the host": "#b58b64", "other stages": "#9aa4ae" };

  /** The bar of what a step is spent on. */
  function partsBar(parts) {
    const whole = sum(Object.values(parts));
    if (!whole) return null;
    const bars = Object.entries(parts).map(([part, seconds]) => h("i", { title: `${part}: ${duration(seconds)}`, style: `width:${((100 * seconds) / whole).toFixed(2)}%;background:${PARTS[part] ?? "#888"}` }));
    const names = Object.entries(parts).map(([part, seconds]) => h("span", {}, h("i", { style: `background:${PARTS[part] ?? "#888"}` }), part, h("b", {}, percent(seconds / whole))));
    return h("div", { class: "parts" }, h("div", { class: "bar" }, bars), h("div", { class: "key" }, names));
  }

  function head(plan, name) {
    return h("header", {}, h("h1", {}, name), h("p", { class: "pale" }, plan.head), h("dl", { class: "figures" }, plan.figures.map(([what, value]) => h("div", {}, h("dt", {}, what), h("dd", {}, value)))), partsBar(plan.parts));
  }

  function tools(drawings) {
    const every = (what) => () => drawings.forEach(what);
    const views = h("input", { type: "checkbox", onchange: (event) => drawings.forEach((drawing) => drawing.setViews(event.target.checked)) });
    return h("div", { class: "tools" }, h("button", { onclick: every((drawing) => drawing.foldAll()) }, "Fold"), h("button", { onclick: every((drawing) => drawing.unfold()) }, "Unfold a level"), h("button", { onclick: every((drawing) => drawing.fit()) }, "Fit"), h("label", {}, views, "views"));
  }

  function start() {
    const panel = new Panel(), names = DATA.diff?.names ?? [DATA.plans[0].name];
    const drawings = DATA.plans.map((plan, at) => new Drawing(plan, names[at], (drawing, key, focus) => panel.show(drawing, key, focus)));
    const search = new Search(drawings);
    const graphs = h("div", { class: "graphs" }, drawings.map((drawing) => h("div", { class: "graph-of" }, drawings.length > 1 ? h("h3", {}, drawing.name) : null, drawing.element)));
    APP.replaceChildren(
      ...(DATA.diff ? [h("h1", {}, `${names[0]} and ${names[1]}`), h("div", { class: "two" }, drawings.map((drawing) => head(drawing.model.plan, drawing.name))), differences(DATA.diff, drawings)] : [head(DATA.plans[0], names[0])]),
      h("section", { class: "card walk" }, h("div", { class: "over" }, search.element, tools(drawings)), h("div", { class: "stage" }, graphs, panel.element)),
      h("div", { class: drawings.length > 1 || drawings[0].model.plan.schedules.length ? "two" : "one" }, drawings.flatMap((drawing) => [memoryCard(drawing), scheduleCard(drawing)]).filter(Boolean)),
      ...(DATA.diff ? [] : [tables(drawings[0])]),
    );
    APP.classList.add("ready");
    drawings.forEach((drawing) => {
      drawing.draw();
      drawing.fit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || /input|textarea/i.test(event.target.tagName)) return;
      search.field.focus();
      event.preventDefault();
    });
    performance.mark("drawn");
  }

  start();
})();
