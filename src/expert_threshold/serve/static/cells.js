// A grid of layers × experts, with a bar and a line for each expert.

import { make, neighbour } from "./dom.js";

/**
 * A grid with a cell for each expert of each layer with a router. `onExpert(layer, expert, event)` is called on "enter",
 * "leave" and "press"; one cell at a time can have the focus, and arrow keys move it.
 */
export class Cells {
  constructor(run, title, onExpert) {
    this.cells = [];
    this.element = make("div", { class: "grid", role: "group", "aria-label": title });
    this.element.style.setProperty("--experts", Math.min(run.experts, 16) || 1);
    run.layers.forEach(({ dense }, layer) => {
      this.element.append(make("span", { class: "layer" }, `Layer ${layer}`));
      if (dense) this.element.append(make("span", { class: "dense muted" }, "dense, no router"));
      else this.element.append(this.#row(run, layer, onExpert));
    });
    this.element.addEventListener("keydown", (event) => this.#move(event));
    if (this.cells.length) this.cells[0].tabIndex = 0;
  }

  #row(run, layer, onExpert) {
    const row = make("div", { class: "experts" });
    for (let expert = 0; expert < run.experts; expert++) {
      const cell = make(
        "button",
        {
          type: "button",
          class: "cell",
          tabIndex: -1,
          "data-expert": `${layer}:${expert}`,
          "aria-pressed": "false",
          onpointerenter: () => onExpert(layer, expert, "enter"),
          onpointerleave: () => onExpert(layer, expert, "leave"),
          onfocus: () => onExpert(layer, expert, "enter"),
          onblur: () => onExpert(layer, expert, "leave"),
          onclick: () => onExpert(layer, expert, "press"),
        },
        make("span", { class: "well" }, make("span", { class: "bar" }), make("span", { class: "line" })),
        make("span", { class: "name", "aria-hidden": "true" }, `${expert}`),
      );
      this.cells.push(cell);
      row.append(cell);
    }
    return row;
  }

  #move(event) {
    const from = this.cells.indexOf(event.target);
    const next = from < 0 ? null : neighbour(this.cells, from, event.key);
    if (next === null) return;
    event.preventDefault();
    this.cells[from].tabIndex = -1;
    this.cells[next].tabIndex = 0;
    this.cells[next].focus();
  }

  /** content(layer, expert) → { bar, line, chosen, label }; bar and line are from 0 to 1; a null line is not drawn. */
  fill(content) {
    for (const cell of this.cells) {
      const { bar, line, chosen, label } = content(...place(cell));
      cell.style.setProperty("--bar", bar);
      cell.querySelector(".line").hidden = line === null;
      cell.style.setProperty("--line", line ?? 0);
      cell.classList.toggle("chosen", chosen);
      cell.setAttribute("aria-label", label);
    }
  }

  /** Highlight the current expert, and mark it if it is pinned. */
  mark(layer, expert, pinned) {
    for (const cell of this.cells) {
      const here = cell.dataset.expert === `${layer}:${expert}`;
      cell.classList.toggle("marked", here);
      cell.setAttribute("aria-pressed", `${here && pinned}`);
    }
  }
}

/** Returns a cell's [layer, expert]. */
export function place(cell) {
  return cell.dataset.expert.split(":").map(Number);
}
