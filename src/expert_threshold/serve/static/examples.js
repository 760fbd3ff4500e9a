// Short example texts; small models have a context of 128 tokens.

export const EXAMPLES = {
  Code: `def running_mean(values, decay=0.9):
    """Yield the mean of what came so far."""
    mean = 0.0
    for value in values:
        mean = decay * mean + (1 - decay) * value
        yield mean
`,
  Math: `Question: A baker fills 4 trays with 12 rolls each and sells 31 rolls. How many rolls are left?
Answer: There are 4 * 12 = 48 rolls, so 48 - 31 = 17 are left.
`,
  Prose:
    "The ferry was late again, so we stood along the rail and watched the fog come in. A child asked whether the " +
    "island would still be there, and her father said that islands are patient.\n",
};
