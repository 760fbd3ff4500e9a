// The server's two endpoints.

let key = "";

/** What every later request says it has the right to, of `--api-key`. */
export function useKey(value) {
  key = value;
}

/** What went wrong, in one line; `needsKey` where the server wants an API key. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.needsKey = status === 401;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer; is `et serve` still running?", 0);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(body?.error?.message ?? `The server answered ${response.status}.`, response.status);
  }
  return response;
}

/** Each run's facts. */
export async function runs() {
  return (await (await ask("explorer/runs")).json()).runs;
}

/** Lists of tokens as they come: those of the text, and those written behind it. */
export async function* read(request, signal) {
  const response = await ask("explorer/read", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  let rest = "";
  for await (const part of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const { tokens, error, done } = JSON.parse(event.replace(/^data: /, ""));
      if (error) throw new Refused(error.message, 0);
      if (done) return;
      yield tokens;
    }
  }
  throw new Refused("The server closed the connection before the text was whole; try again.", 0);
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
