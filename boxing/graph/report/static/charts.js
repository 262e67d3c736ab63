// Charts: memory over the step with its slider, and schedules.

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
  const ticks = onAxis([0, 0.25, 0.5, 0.75, 1].map((share) => share * end)).map((words) => h("span", {}, words));
  return h("div", { class: "lanes-of" }, h("h3", {}, schedule.name, h("span", { class: "pale" }, ` ${duration(schedule.end)}${schedule.left ? `; the first ${schedule.tasks.length} tasks of ${schedule.tasks.length + schedule.left}` : ""}`)),
    h("div", { class: "lanes-grid" }, h("div", { class: "queues" }, schedule.queues.map((queue) => h("span", { title: queue }, queue))), plot), h("div", { class: "ticks" }, ticks), schedule.note ? h("p", { class: "pale" }, schedule.note) : null);
}
