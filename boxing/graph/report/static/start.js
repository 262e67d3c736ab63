// The start: the page is put together, the graph first.

/** The bar of what a step is spent on: the name, the seconds and the colour of each part. */
function partsBar(parts) {
  const whole = sum(parts.map(([, seconds]) => seconds));
  if (!whole) return null;
  const bars = parts.map(([part, seconds, fill]) => h("i", { title: `${part}: ${duration(seconds)}`, style: `width:${((100 * seconds) / whole).toFixed(2)}%;background:${fill}` }));
  const names = parts.map(([part, seconds, fill]) => h("span", {}, h("i", { style: `background:${fill}` }), part, h("b", {}, percent(seconds / whole))));
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
  const top = DATA.diff ? [h("h1", {}, `${names[0]} and ${names[1]}`), h("div", { class: "two" }, drawings.map((drawing) => head(drawing.model.plan, drawing.name)))] : [head(DATA.plans[0], names[0])];
  const walk = h("section", { class: "card walk" }, h("div", { class: "over" }, search.element, tools(drawings)), h("div", { class: "stage" }, graphs, panel.element));
  APP.replaceChildren(...top, walk);
  drawings.forEach((drawing) => {
    drawing.draw();
    drawing.fit();
  });
  performance.mark("drawn");
  // The graph is there to be looked at; what stands below it comes once it is on the screen.
  requestAnimationFrame(() => setTimeout(() => {
    const cards = drawings.flatMap((drawing) => [memoryCard(drawing), scheduleCard(drawing)]).filter(Boolean);
    APP.append(h("div", { class: cards.length > 1 ? "two" : "one" }, cards), ...(DATA.diff ? [] : [tables(drawings[0])]));
    if (DATA.diff) walk.before(differences(DATA.diff, drawings));
    APP.classList.add("ready");
    performance.mark("whole");
  }));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /input|textarea/i.test(event.target.tagName)) return;
    search.field.focus();
    event.preventDefault();
  });
}

start();
