// Shapes: sizes and places of what is drawn, by dagre, and boxes and wires as SVG.

const HEAD = 30, PAD = 14, LETTER = 6.6, TOP = "top";

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
  const above = items.filter((key) => key[0] === "n" && model.nodes[Number(key.slice(1))].top);
  if (above.length && !across) {
    // A point that nobody sees stands above all that begins here, and just above the inputs.
    const begins = graph.sources().filter((key) => !above.includes(key));
    graph.setNode(TOP, { width: 0, height: 0 });
    above.forEach((key) => graph.setEdge(TOP, key, { weight: 100, width: 0, height: 0 }));
    begins.forEach((key) => graph.setEdge(TOP, key, { weight: 0, width: 0, height: 0 }));
  }
  dagre.layout(graph);
  const { width, height } = graph.graph();
  return {
    w: Number.isFinite(width) ? width : 0,
    h: Number.isFinite(height) ? height : 0,
    items: graph.nodes().filter((key) => key !== TOP).map((key) => {
      const { x, y, width: w, height: tall } = graph.node(key);
      return { key, w, h: tall, x: x - w / 2, y: y - tall / 2, inside: inside.get(key) };
    }),
    edges: graph.edges().filter(({ v }) => v !== TOP).map(({ v, w }) => ({ tail: v, head: w, ...graph.edge(v, w) })),
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
  const whole = model.whole;
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
