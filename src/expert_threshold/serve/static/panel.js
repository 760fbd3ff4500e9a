// One run's view of the text: its tokens, the loads of its experts, and one token in detail.

import { Cells, place } from "./cells.js";
import { make, neighbour, number, percent, plural, quoted, visible } from "./dom.js";
import { MEASURES, aim, fanout, step } from "./scale.js";

const ENCODER = new TextEncoder();

export class Panel {
  /** Calls on.select(panel, index, show) when a token is opened, and on.pin() when an expert is pinned or released. */
  constructor(run, on) {
    this.run = run;
    this.on = on;
    this.routers = run.layers.flatMap(({ dense }, layer) => (dense ? [] : [layer]));
    this.pinned = null; // [layer, expert]
    this.looked = null;
    this.#build();
    this.begin(run);
  }

  #build() {
    const { run } = this;
    const onExpert = (layer, expert, event) => this.#onExpert(layer, expert, event);
    this.summary = make("dl", { class: "numbers" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.tokensBox = make("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": `Tokens as ${run.name} reads them`,
      onclick: (event) => this.#onClick(event),
      onkeydown: (event) => this.#onKey(event),
    });
    this.loads = new Cells(run, `Loads of ${run.name}'s experts`, onExpert);
    this.scores = new Cells(run, `The token's scores for ${run.name}'s experts`, onExpert);
    this.readout = make("p", { class: "readout small" });
    this.loadsHint = make("p", { class: "muted small" });
    const loads = make("section", { class: "loads" }, make("h3", {}, "Loads"), this.loadsHint, this.loads.element);
    const report = run.report ? [" · ", make("a", { href: run.report }, "report")] : [];
    this.inspector = make("section", { class: "inspector", "aria-label": `Token details of ${run.name}` });
    this.element = make(
      "section",
      { class: "panel", "aria-label": run.name },
      make("header", {}, make("h2", {}, run.name), make("p", { class: "muted small" }, this.#about(), ...report)),
      this.error,
      this.summary,
      make("div", { class: "reading" }, this.tokensBox, ...(run.experts ? [this.readout] : [])),
      this.inspector,
      ...(run.experts ? [loads] : []),
    );
  }

  /** The share of the tokens that each expert should get. */
  get target() {
    return this.now.experts ? this.now.experts_per_token / this.now.experts : 0;
  }

  #about() {
    const { run } = this;
    const shared = run.shared_experts ? ` and ${run.shared_experts} shared` : "";
    const experts = run.experts
      ? `${run.layers.length} layers, ${run.experts} experts, ${run.experts_per_token} per token${shared}`
      : `${run.layers.length} layers`;
    return `${run.rule.replaceAll("_", " ")} · ${experts} · ${run.context} tokens at once`;
  }

  // Reading.

  /** Prepare for a new text. facts: the run's description for it, since cutoffs depend on the rate. */
  begin(facts) {
    this.now = facts;
    this.tokens = [];
    this.spoken = ""; // the text generated
    this.written = 0; // tokens generated
    this.began = this.last = performance.now(); // when the response started, and when its last generated token arrived
    this.spans = [];
    this.sums = { nats: 0, losses: 0, bytes: 0, fanout: 0 };
    this.starts = []; // where each token starts in the text
    this.length = 0;
    this.counts = this.run.layers.map(() => new Array(this.run.experts).fill(0));
    this.ranges = this.run.layers.map(() => [Infinity, -Infinity]); // of scores
    this.selected = null;
    this.focused = 0;
    this.tokensBox.replaceChildren();
    this.#inspect();
    this.draw();
  }

  add(tokens, scale) {
    for (const token of tokens) {
      this.starts.push(this.length);
      this.length += token.text.length;
      const span = this.#span(token, this.tokens.length);
      this.tokens.push(token);
      this.spans.push(span);
      this.#paint(span, token, scale);
      if (token.written) {
        this.spoken += token.text;
        this.written++;
        this.last = performance.now();
      }
      this.sums.nats += token.loss ?? 0;
      this.sums.losses += token.loss !== null;
      this.sums.bytes += ENCODER.encode(token.text).length;
      this.sums.fanout += fanout(token);
      token.layers.forEach((routed, i) => this.#count(this.routers[i], routed));
    }
    this.frame ??= requestAnimationFrame(() => this.draw()); // tokens may arrive faster than frames
  }

  /** Update the page. */
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const box = this.tokensBox;
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 40;
    box.append(...this.spans.slice(box.childElementCount)); // those that are not on the page yet
    if (atEnd && this.spoken) box.scrollTop = box.scrollHeight;
    this.#total();
    this.#look();
  }

  #count(layer, { scores, experts }) {
    for (const expert of experts) this.counts[layer][expert]++;
    const [low, high] = this.ranges[layer];
    this.ranges[layer] = [Math.min(low, ...scores), Math.max(high, ...scores)];
  }

  /** Show a one-line error, or clear it with null. */
  fail(message) {
    this.error.textContent = message ?? "";
    this.error.hidden = !message;
  }

  #span(token, index) {
    const opens = index === 0;
    const special = opens || !token.text;
    const sign = opens ? "start" : token.finish === "stop" ? "end" : token.label; // drawn by CSS: no part of the text
    const words = [
      opens ? "start of the text" : quoted(token.label),
      ...(this.run.experts ? [plural(fanout(token), "expert")] : []),
      ...(token.loss === null ? [] : [`loss ${number(token.loss)} nats`]),
    ];
    const span = make("span", {
      class: `token${special ? " special" : ""}${token.written ? " written" : ""}`,
      role: "option",
      tabIndex: index === 0 ? 0 : -1,
      "aria-selected": "false",
      "aria-label": words.join(", "),
      "data-index": index,
      ...(special ? { "data-sign": sign } : {}),
    });
    span.append(...visible(token.text));
    return span;
  }

  // Colours.

  recolour(scale) {
    this.spans.forEach((span, i) => this.#paint(span, this.tokens[i], scale));
  }

  #paint(span, token, scale) {
    span.dataset.step = step(MEASURES[scale.by].of(token), scale.bins);
  }

  // Experts.

  #onExpert(layer, expert, event) {
    if (event === "press") {
      this.pin(same(this.pinned, [layer, expert]) ? null : [layer, expert]);
    } else {
      this.looked = event === "enter" ? [layer, expert] : null;
      this.#look();
    }
  }

  /** Keep an expert's tokens highlighted: [layer, expert], or null for none. */
  pin(cell) {
    const known = cell && this.routers.includes(cell[0]) && cell[1] >= 0 && cell[1] < this.run.experts;
    this.pinned = known ? cell : null;
    this.#look();
    this.on.pin();
  }

  /** Highlight the tokens of the expert under the pointer, else of the pinned one. */
  #look() {
    const [layer, expert] = this.looked ?? this.pinned ?? [null, null];
    const i = this.routers.indexOf(layer);
    this.tokensBox.classList.toggle("dimmed", i >= 0);
    this.spans.forEach((span, t) => {
      span.classList.toggle("lit", i >= 0 && this.tokens[t].layers[i].experts.includes(expert));
    });
    const pinned = !this.looked || same(this.looked, this.pinned);
    for (const grid of [this.loads, this.scores]) grid.mark(layer, expert, pinned);
    this.readout.textContent =
      i < 0 ? "Point at an expert to highlight its tokens; click to keep them highlighted." : this.#words(layer, expert);
  }

  #words(layer, expert) {
    const line = `Layer ${layer}, expert ${expert}: ${this.#load(layer, expert)}.`;
    return this.selected === null ? line : `${line} This token: ${this.#verdict(layer, expert)}.`;
  }

  #share(layer, expert) {
    return this.counts[layer][expert] / Math.max(this.tokens.length, 1);
  }

  #load(layer, expert) {
    const took = `${this.counts[layer][expert]} of ${plural(this.tokens.length, "token")}`;
    return `${took}, ${percent(this.#share(layer, expert))}`;
  }

  #total() {
    const { tokens, sums, written } = this;
    const shares = this.routers.flatMap((layer) => this.counts[layer].map((_, expert) => this.#share(layer, expert)));
    const entries = [[`tokens, ${this.run.context - tokens.length} left in the context`, `${tokens.length}`]];
    const speed = (1000 * written) / Math.max(this.last - this.began, 1);
    if (written) entries.push(["generated tokens per second", speed.toFixed(speed < 10 ? 1 : 0)]);
    if (sums.losses) entries.push(["nats per token", (sums.nats / sums.losses).toFixed(2)]);
    if (sums.losses && sums.bytes) entries.push(["bits per byte", (sums.nats / Math.LN2 / sums.bytes).toFixed(2)]);
    if (this.run.experts && tokens.length) {
      const mean = sums.fanout / tokens.length / this.routers.length;
      entries.push([`experts per token and layer, target ${this.now.experts_per_token}`, mean.toFixed(2)]);
    }
    const shown = entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.summary.replaceChildren(...shown);
    this.loadsHint.textContent = `Bar: share of the tokens. Line: the target, ${percent(this.target)}.`;
    const high = Math.max(2 * this.target, ...shares) || 1;
    this.loads.fill((layer, expert) => {
      const share = this.#share(layer, expert);
      const label = `layer ${layer}, expert ${expert}: ${this.#load(layer, expert)}`;
      return { bar: share / high, line: this.target / high, chosen: share > 0, label };
    });
  }

  // One token.

  #onClick(event) {
    const token = event.target.closest(".token");
    if (token) this.on.select(this, Number(token.dataset.index), true);
  }

  #onKey(event) {
    if (!event.target.classList.contains("token")) return;
    const index = Number(event.target.dataset.index);
    const next = neighbour(this.spans, index, event.key);
    if (next !== null) {
      event.preventDefault();
      this.#hold(next);
      this.spans[next].focus();
      if (this.selected !== null) this.on.select(this, next);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.on.select(this, index, true);
    }
  }

  /** Make this the token that Tab moves the focus to. */
  #hold(index) {
    if (this.spans[this.focused]) this.spans[this.focused].tabIndex = -1;
    this.focused = index;
    this.spans[index].tabIndex = 0;
  }

  /** Returns the index of the token that holds the character at this offset of the text. */
  at(offset) {
    const found = this.starts.findIndex((start, i) => i > 0 && start + this.tokens[i].text.length > offset);
    return found < 0 ? this.tokens.length - 1 : found;
  }

  /** Open a token, or null for none; `show` scrolls to its details. */
  select(index, show = false) {
    const known = index !== null && index >= 0 && index < this.tokens.length;
    if (this.selected !== null) this.spans[this.selected]?.setAttribute("aria-selected", "false");
    this.selected = known ? index : null;
    if (known) {
      this.#hold(index);
      this.spans[index].setAttribute("aria-selected", "true");
    }
    this.#inspect();
    this.#look();
    if (known && show) this.inspector.scrollIntoView({ block: "nearest" });
  }

  #inspect() {
    const token = this.selected === null ? null : this.tokens[this.selected];
    for (const cell of this.loads.cells) {
      const [layer, expert] = place(cell);
      const experts = token?.layers[this.routers.indexOf(layer)].experts;
      cell.classList.toggle("of-token", Boolean(experts?.includes(expert)));
    }
    if (token === null) {
      const hint = "Select a token to see its experts, its loss and the tokens that the model expected.";
      this.inspector.replaceChildren(make("p", { class: "muted" }, hint));
      return;
    }
    this.scores.fill((layer, expert) => {
      const { score, cutoff, chosen } = this.#at(layer, expert);
      const [low, high] = this.ranges[layer];
      const share = (value) => Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
      const label = `layer ${layer}, expert ${expert}: ${this.#verdict(layer, expert)}`;
      return { bar: share(score), line: cutoff === null ? null : share(cutoff), chosen, label };
    });
    this.inspector.replaceChildren(...this.#heading(token), ...(this.run.experts ? this.#routing() : []));
  }

  #heading(token) {
    const opens = this.selected === 0;
    const title = opens ? "Start of the text" : quoted(token.label);
    const facts = [`token ${this.selected} of ${this.tokens.length - 1}, id ${token.token}`];
    if (token.loss !== null) {
      facts.push(`loss ${number(token.loss)} nats`, `probability ${percent(Math.exp(-token.loss))}`);
    }
    if (this.run.experts) facts.push(`${plural(fanout(token), "expert")}, target ${number(aim(this.now))}`);
    const parts = [make("h3", { class: "chosen-token" }, title), make("p", { class: "facts" }, facts.join(" · "))];
    if (token.top.length) parts.push(this.#likeliest(token));
    return parts;
  }

  #likeliest(token) {
    const rows = token.top.map(([id, label, probability]) => {
      const bar = make("span", { class: "share" });
      bar.style.setProperty("--bar", probability / token.top[0][2]);
      const track = make("span", { class: "track", "aria-hidden": "true" }, bar);
      const value = make("span", { class: "value" }, percent(probability));
      return make("li", id === token.token ? { class: "itself" } : {}, make("code", {}, quoted(label)), track, value);
    });
    return make("div", {}, make("h4", {}, "Likeliest here"), make("ol", { class: "likeliest" }, ...rows));
  }

  #routing() {
    const line = this.#hasCutoffs()
      ? "the cutoff"
      : "the lowest chosen score" + (this.run.layers.some(({ biases }) => biases) ? ", minus the bias" : "");
    const table = make("details", {}, make("summary", {}, "All numbers"));
    table.addEventListener("toggle", () => table.open && table.childElementCount === 1 && table.append(this.#table()));
    return [
      make("h4", {}, "Layers × experts"),
      make("p", { class: "muted small" }, `Bar: score, within its range in the text. Line: ${line}. Blue: chosen.`),
      this.scores.element,
      make("p", { class: "gates small" }, this.#gates()),
      table,
    ];
  }

  #gates() {
    const { layers } = this.tokens[this.selected];
    const chosen = layers.flatMap(({ experts, gates }, i) => {
      const each = experts.map((expert, j) => `${expert}: ${number(gates[j])}`);
      return each.length ? [`layer ${this.routers[i]} (${each.join(", ")})`] : [];
    });
    return chosen.length ? `Gates by expert: ${chosen.join(", ")}.` : "No expert was chosen.";
  }

  #table() {
    const head = ["layer", "expert", "score", this.#hasCutoffs() ? "cutoff" : "border", "gate", "chosen"];
    const rows = this.scores.cells.map((cell) => {
      const { score, cutoff, gate, chosen } = this.#at(...place(cell));
      const numbers = [number(score), cutoff === null ? "" : number(cutoff), chosen ? number(gate) : ""];
      const cells = [...place(cell), ...numbers, chosen ? "yes" : ""].map((each) => make("td", {}, `${each}`));
      return make("tr", chosen ? { class: "itself" } : {}, ...cells);
    });
    const names = make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)));
    return make(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", "aria-label": `All numbers of ${this.run.name}` },
      make("table", {}, make("thead", {}, names), make("tbody", {}, ...rows)),
    );
  }

  /** Returns true if the rule only compares scores with cutoffs; else the line marks the lowest chosen score. */
  #hasCutoffs() {
    return this.run.layers.some(({ cutoffs }) => cutoffs);
  }

  /** Returns the open token's numbers for an expert. cutoff: the one for its score, or the lowest chosen score, or null. */
  #at(layer, expert) {
    const { scores, experts, gates, border } = this.tokens[this.selected].layers[this.routers.indexOf(layer)];
    const { cutoffs, biases } = this.now.layers[layer];
    const i = experts.indexOf(expert);
    const lowest = border === null ? null : border - (biases ? biases[expert] : 0);
    const cutoff = cutoffs ? cutoffs[expert] : lowest;
    return { score: scores[expert], cutoff, gate: gates[i], chosen: i >= 0 }; // only chosen experts have a gate
  }

  #verdict(layer, expert) {
    const { score, cutoff, gate, chosen } = this.#at(layer, expert);
    const other = this.#hasCutoffs() ? "cutoff" : "border";
    const outcome = chosen ? `chosen, gate ${number(gate)}` : "not chosen";
    const compared = cutoff === null ? "" : `, ${other} ${number(cutoff)}`;
    return `score ${number(score)}${compared}, ${outcome}`;
  }
}

function same(a, b) {
  return a !== null && b !== null && a[0] === b[0] && a[1] === b[1];
}
