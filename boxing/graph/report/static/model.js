// The model: a plan's graph as it is folded now, and its edges, lifted to what is shown.

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
    this.whole = sum(this.nodes.map((node) => (node.seconds ?? 0) * node.times));
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
