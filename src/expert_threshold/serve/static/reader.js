// The server's two endpoints.

/** Returns the response. Throws an Error with a one-line message for the page. */
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not respond; is et serve still running?");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
  }
  return response;
}

/** Returns a description of each run. */
export async function runs() {
  return (await (await ask("explorer/runs")).json()).runs;
}

/** Yields { run }, described at the rate of this text, then { tokens } as they are read and generated. */
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
      const news = JSON.parse(event.replace(/^data: /, ""));
      if (news.error) throw new Error(news.error.message);
      if (news.done) return;
      yield news;
    }
  }
  throw new Error("The server closed the connection early; try again.");
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
