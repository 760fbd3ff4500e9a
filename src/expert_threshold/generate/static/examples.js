// Short texts to begin with.

export const EXAMPLES = {
  Code: `def running_mean(values, decay=0.99):
    """Yield the mean of what came so far, the old weighing less."""
    mean, weight = 0.0, 0.0
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        yield mean / weight
`,
  Math: `Question: A baker fills 4 trays with 12 rolls each and sells 31 rolls before noon. How many rolls are left?
Answer: There are 4 * 12 = 48 rolls. After 31 are sold, 48 - 31 = 17 are left. The answer is 17.
`,
  Prose: `The ferry was late again, so the passengers stood along the rail and watched the fog come in. Nobody spoke of the
weather. A child asked whether the island would still be there, and her father said that islands are patient.
`,
};
