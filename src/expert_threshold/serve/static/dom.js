// Elements built without parsing HTML, so that text stays text.

/** Returns an element. `class`, `role`, `aria-…`, `data-…` become attributes, `on…` listeners, the rest properties. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (/^(class|role|for|scope|aria-|data-)/.test(key)) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

export function percent(share) {
  const value = 100 * share;
  return `${value >= 9.95 || value === 0 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : "<0.1"} %`;
}

const INFINITE = 1e38; // stands for infinity, which JSON lacks

/** Formats a number with up to three significant digits, and a minus as wide as a digit. */
export function number(value) {
  if (Math.abs(value) >= INFINITE) return value < 0 ? "−∞" : "∞";
  return (Number.isInteger(value) ? `${value}` : value.toPrecision(3)).replace("-", "−").replace(/e\+?/, "e");
}

// Characters that have no width or that reorder others: controls, joiners, right-to-left marks, and accents without a
// letter.
const UNSEEN = /((?!\t)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]|^\p{M}+)/u;

/** Returns a token's text as child nodes in which unseen characters are visible; copying them gives the plain text. */
export function visible(text) {
  const parts = text.split(UNSEEN); // every second one is unseen
  return parts.map((part, i) => (i % 2 ? make("span", { class: "unseen", "data-sign": sign(part) }, part) : part));
}

function sign(unseen) {
  if (/\p{M}/u.test(unseen)) return "◌";
  return unseen === "\n" ? "↵" : `U+${unseen.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Returns a token's text in quotes, with its white space visible. */
export function quoted(label) {
  const parts = label.replaceAll("\t", "⇥").split(UNSEEN);
  return `‘${parts.map((part, i) => (i % 2 && !/\p{M}/u.test(part) ? sign(part) : part)).join("")}’`;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Returns the index in `items` that an arrow key, Home or End moves to from `place`; up and down go by screen lines. */
export function neighbour(items, place, key) {
  if (key === "Home") return 0;
  if (key === "End") return items.length - 1;
  if (key === "ArrowLeft") return Math.max(place - 1, 0);
  if (key === "ArrowRight") return Math.min(place + 1, items.length - 1);
  if (key === "ArrowUp" || key === "ArrowDown") return lineBeside(items, place, key === "ArrowUp" ? -1 : 1);
  return null;
}

function lineBeside(items, place, way) {
  const box = (i) => items[i].getClientRects()[0];
  const from = box(place);
  let best = place;
  let line = null;
  for (let i = place + way; i >= 0 && i < items.length; i += way) {
    const at = box(i);
    if (!at || Math.abs(at.top - from.top) < 4) continue;
    line ??= at.top;
    if (Math.abs(at.top - line) >= 4) break;
    if (best === place || Math.abs(at.left - from.left) < Math.abs(box(best).left - from.left)) best = i;
  }
  return best;
}
