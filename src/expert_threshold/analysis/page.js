// Charts: values under the pointer, logarithmic axes, values as a table. Tables: sorting by the clicked column.
const format = value => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
const element = (tag, text, parent) => {
  const made = Object.assign(document.createElement(tag), { textContent: text });
  parent?.append(made);
  return made;
};

class Panel {
  constructor(svg, facts, group) {
    Object.assign(this, facts, { svg, group, logs: { x: facts.log[0], y: facts.log[1] }, drawn: {} });
    this.ends = { x: [this.box[0], this.box[2]], y: [this.box[3], this.box[1]] };
    this.limits = { x: this.xlim, y: this.ylim };
    if (!group) return;
    for (const path of group.querySelectorAll("path[clip-path]")) path.plain = path.getAttribute("d");
    for (const use of group.querySelectorAll("[clip-path] use")) use.plain = [+use.getAttribute("x"), +use.getAttribute("y")];
    for (const name of ["x", "y"]) this.drawn[name] = this.axisOf(name).innerHTML;
  }
  axisOf(name) {
    return this.group.querySelectorAll("[id*='-matplotlib.axis_']")[name === "x" ? 0 : 1];
  }
  limit(name) {  // a logarithmic axis starts at the smallest positive value in view
    const [low, high] = this.limits[name];
    const seen = this.lines.flatMap(line => line[name]).filter(value => value > 0 && value >= low && value <= high);
    return [Math.max(low, 0.95 * Math.min(...seen, high)), high];
  }
  place(name, value, log = this.logs[name]) {
    const [low, high] = log ? this.limit(name).map(Math.log) : this.limits[name];
    const [start, end] = this.ends[name];
    return start + ((log ? Math.log(Math.max(value, 1e-300)) : value) - low) / (high - low) * (end - start);
  }
  moved(name, at) {  // from the drawn position to the position on the current axis
    const [low, high] = this.limits[name], [start, end] = this.ends[name];
    if (!this.logs[name] || this.log[name === "y" ? 1 : 0]) return at;
    return this.place(name, low + (at - start) / (end - start) * (high - low));
  }
  toggle(name) {
    this.logs[name] = !this.logs[name];
    const points = /([ML]) (\S+) (\S+)/g;
    for (const path of this.group.querySelectorAll("path[clip-path]"))
      if (path.plain) path.setAttribute("d", path.plain.replace(points, (_, kind, x, y) =>
        `${kind} ${this.moved("x", +x)} ${this.moved("y", +y)}`));
    for (const use of this.group.querySelectorAll("[clip-path] use"))
      if (use.plain) ["x", "y"].forEach((each, place) => use.setAttribute(each, this.moved(each, use.plain[place])));
    for (const each of this.group.querySelectorAll("[id$=-leader]")) each.style.display = this.logs.x || this.logs.y ? "none" : "";
    this.axis(name);
  }
  axis(name) {
    const axis = this.axisOf(name);
    axis.innerHTML = this.drawn[name];
    if (!this.logs[name]) return;
    const [low, high] = this.limit(name), powers = Math.log10(high / low);
    const digits = powers < 0.8 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : powers < 2.5 ? [1, 2, 5] : [1];
    const ticks = [...axis.querySelectorAll(":scope > g")].filter(tick => tick.querySelector("g"));  // the label is no tick
    const [text, grid] = [axis.querySelector("text"), axis.querySelector("path[clip-path]")];
    for (const tick of ticks) tick.remove();
    if (!text) return;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of digits) {
        const value = digit * 10 ** power, at = this.place(name, value);
        if (value < low || value > high) continue;
        const label = text.cloneNode();
        label.textContent = Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
        label.removeAttribute("transform");
        label.setAttribute("x", name === "x" ? at : this.box[0] - 4);
        label.setAttribute("y", name === "x" ? this.box[3] + 14 : at + 4);
        label.style.textAnchor = name === "x" ? "middle" : "end";
        axis.append(label);
        if (grid && name === "y") {
          const line = grid.cloneNode();
          line.setAttribute("d", `M ${this.box[0]} ${at} L ${this.box[2]} ${at}`);
          axis.append(line);
        }
      }
  }
  nearest(x, y) {
    let best = null;
    for (const line of this.lines)
      line.x.forEach((value, place) => {
        if (line.y[place] === null) return;
        const away = Math.hypot(this.place("x", value) - x, (this.place("y", line.y[place]) - y) / 2);
        if (!(away >= best?.away)) best = { away, line, place };
      });
    return best;
  }
}

for (const figure of document.querySelectorAll("figure")) {
  const data = figure.querySelector("script[type='application/json']");
  if (!data) continue;
  const svg = figure.querySelector("svg"), groups = [...svg.querySelectorAll("[id*=-axes_]")];
  const panels = JSON.parse(data.textContent).map(facts => new Panel(svg, facts, groups[facts.axes]));
  const tip = element("div", "", figure);
  Object.assign(tip, { className: "tip", hidden: true });
  svg.onpointerleave = () => { tip.hidden = true; };
  svg.onpointermove = event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const panel = panels.find(({ box: [left, top, right, bottom] }) =>
      at.x >= left - 5 && at.x <= right + 5 && at.y >= top - 5 && at.y <= bottom + 5);
    const found = panel?.nearest(at.x, at.y);
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = `${found.line.name}\n${panel.xlabel} ${format(found.line.x[found.place])}\n${format(found.line.y[found.place])}`;
    const frame = figure.getBoundingClientRect(), left = event.clientX - frame.left;
    tip.style.top = `${event.clientY - frame.top + 16}px`;
    tip.style.left = `${Math.max(0, Math.min(left + 12, frame.width - tip.offsetWidth))}px`;
  };
  const scales = figure.querySelector(".scales");
  for (const name of ["x", "y"]) {
    const able = panels.filter(panel => panel.scalable && !panel.log[name === "y" ? 1 : 0] && panel.limits[name][1] > 0);
    if (!able.length) continue;
    const button = element("button", `log ${name}`, scales);
    button.ariaPressed = "false";
    button.onclick = () => {
      button.ariaPressed = String(button.ariaPressed === "false");
      for (const panel of able) panel.toggle(name);
    };
  }
  const values = figure.querySelector("details.values");
  values.ontoggle = () => {
    if (values.querySelector("table")) return;
    for (const panel of panels) {
      const scroll = element("div", "", values), table = element("table", "", scroll);
      Object.assign(scroll, { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `Values: ${panel.title}` });
      if (panels.length > 1) element("caption", panel.title, table);
      const places = [...new Set(panel.lines.flatMap(line => line.x))].sort((a, b) => a - b);
      const at = panel.lines.map(line => new Map(line.x.map((x, place) => [x, line.y[place]])));
      const head = element("tr", "", element("thead", "", table)), body = element("tbody", "", table);
      for (const name of [panel.xlabel, ...panel.lines.map(line => line.name)]) element("th", name, head).scope = "col";
      for (const x of places) {
        const row = element("tr", "", body);
        for (const value of [x, ...at.map(line => line.get(x))]) element("td", value == null ? "–" : format(value), row);
      }
    }
  };
}

for (const head of document.querySelectorAll("th button")) head.onclick = () => {
  const column = head.closest("th"), index = column.cellIndex, body = column.closest("table").tBodies[0];
  const up = column.ariaSort !== "ascending";
  for (const other of column.parentNode.cells) other.ariaSort = "none";
  column.ariaSort = up ? "ascending" : "descending";
  const units = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
  const key = row => {
    const text = row.cells[index].textContent;
    const found = text.replace(/,/g, "").replace("−", "-").match(/[-+]?[0-9.]+([kMBT]?)/);
    return index && found ? parseFloat(found[0]) * (units[found[1]] ?? 1) : text;
  };
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  });
  body.append(...rows);
};
