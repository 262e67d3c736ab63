// Tables that are sorted, tabs, and what differs between two plans.

/** A table that is sorted by its heads: columns are [head, of a row: number or text, how it is shown]. */
function sortable(columns, rows, picked) {
  const body = h("tbody"), MOSTROWS = 30;
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
