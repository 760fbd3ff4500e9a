// The colours of tokens: nine steps from the page's colour on, classes c0 to c8 of the style sheet.

const STEPS = 9;

/** What tokens may be coloured by: their number, and a step of the scale that ends at `most`. */
export const MEASURES = {
  fanout: { of: (token) => fanout(token), unit: "experts", least: (runs) => 2 * Math.max(...runs.map(aim)) },
  loss: { of: (token) => token.loss ?? 0, unit: "nats", least: () => STEPS - 1 },
};

/** Routed experts of a token, over all layers. */
export function fanout(token) {
  return token.layers.reduce((sum, layer) => sum + layer.experts.length, 0);
}

/** Routed experts of a token over all layers that the run aims at. */
export function aim(run) {
  return run.experts_per_token * run.layers.filter((layer) => !layer.dense).length;
}

/** Whole numbers from 0 on as steps of equal width, the last one open: [{ from, to, step }]. */
export function bins(most) {
  const width = Math.max(1, Math.ceil((most + 1) / STEPS));
  const count = Math.max(1, Math.min(STEPS, Math.ceil((most + 1) / width)));
  return Array.from({ length: count }, (_, i) => ({
    from: i * width,
    to: i === count - 1 ? Infinity : (i + 1) * width,
    step: count === 1 ? 0 : Math.round((i * (STEPS - 1)) / (count - 1)),
  }));
}

export function step(value, among) {
  return (among.find((bin) => value < bin.to) ?? among.at(-1)).step;
}

/** The legend's words for a bin. */
export function words(bin) {
  if (bin.to === Infinity) return `${bin.from}+`;
  return bin.to - bin.from > 1 ? `${bin.from}–${bin.to - 1}` : `${bin.from}`;
}
