// Details: what is known of an op, a move, a group or a task, in the panel beside the drawing.

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

/** How much of a move goes on beside computing, and for how much of it something waits; where that is known. */
function hiddenAndWaited(row, each) {
  if (row.hidden === null) return [];
  const waited = Math.max(0, row.seconds - row.hidden);
  return [["hidden beside computing", duration(row.hidden) + each], ["waited for", duration(waited) + each]];
}

function moveDetails(drawing, at) {
  const model = drawing.model, row = model.plan.moves[at], each = row.count > 1 ? " each" : "";
  const figures = [["the busiest rank receives", volume(row.bytes) + each], ["all ranks send", volume(row.total) + each], ["time", duration(row.seconds) + each], ...hiddenAndWaited(row, each), ...(row.count > 1 ? [["times", `${row.count}, ${duration(row.seconds * row.count)} in all`]] : []), ...(row.once ? [["when", "once a step"]] : [])];
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
