// The colours of tokens: nine steps from the page's colour on, told apart by `data-step`, and what each step stands for.

const STEPS = 9;
const AIMS = [0, 1 / 3, 2 / 3, 1, 4 / 3, 2, 3, 4, 5]; // where bins of the fanout begin, in units of what is aimed at
const NATS = [0, 1, 2, 3, 4, 5, 6, 8, 10];

/** What tokens may be coloured by: a token's number, and where the bins begin. No text moves them. */
export const MEASURES = {
  fanout: { of: fanout, edges: (runs) => AIMS.map((part) => Math.ceil(part * Math.max(...runs.map(aim)) - 1e-9)) },
  loss: { of: (token) => token.loss ?? 0, edges: () => NATS },
};

/** Routed experts of a token, over all layers. */
export function fanout(token) {
  return token.layers.reduce((sum, layer) => sum + layer.experts.length, 0);
}

/** Routed experts of a token over all layers that the run aims at. */
export function aim(run) {
  return run.experts_per_token * run.layers.filter((layer) => !layer.dense).length;
}

/** The bins of a measure, the last one open: [{ from, to, step }]. */
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

/** The legend's words for a bin; whole numbers are told one by one. */
export function words(bin, whole) {
  if (bin.to === Infinity) return `${bin.from}+`;
  const last = whole ? bin.to - 1 : bin.to;
  return last > bin.from ? `${bin.from}–${last}` : `${bin.from}`;
}
