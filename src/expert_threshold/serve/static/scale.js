// The colours of tokens: nine steps that start at the page's colour, set by `data-step`, and the range of each step.

const STEPS = 9;
const AIMS = [0, 1 / 3, 2 / 3, 1, 4 / 3, 2, 3, 4, 5]; // lower edges of the bins of the fanout, in units of the target
const NATS = [0, 1, 2, 3, 4, 5, 6, 8, 10];

/** The measures that tokens can be coloured by: a token's value, and bin edges, which do not depend on the text. */
export const MEASURES = {
  fanout: { of: fanout, edges: (runs) => AIMS.map((part) => Math.ceil(part * Math.max(...runs.map(aim)) - 1e-9)) },
  loss: { of: (token) => token.loss ?? 0, edges: () => NATS },
};

/** Returns the routed experts of a token, over all layers. */
export function fanout(token) {
  return token.layers.reduce((sum, layer) => sum + layer.experts.length, 0);
}

/** Returns the target for the routed experts of a token, over all layers. */
export function aim(run) {
  return run.experts_per_token * run.layers.filter((layer) => !layer.dense).length;
}

/** Returns the bins of a measure, the last one open: [{ from, to, step }]. */
export function bins(by, runs) {
  const edges = [...new Set(MEASURES[by].edges(runs))];
  return edges.map((from, i) => ({
    from,
    to: edges[i + 1] ?? Infinity,
    step: Math.round((i * (STEPS - 1)) / Math.max(edges.length - 1, 1)),
  }));
}

export function step(value, among) {
  return among.find((bin) => value < bin.to).step;
}

/** Returns the legend's label for a bin; among whole numbers it names the first and the last. */
export function words(bin, whole) {
  if (bin.to === Infinity) return `${bin.from}+`;
  const last = whole ? bin.to - 1 : bin.to;
  return last > bin.from ? `${bin.from}–${last}` : `${bin.from}`;
}
