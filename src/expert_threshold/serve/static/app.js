// The page: its input, its requests to the server, its view, and the link that restores the view.

import { make, plural } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { Panel } from "./panel.js";
import { read, runs as fetchRuns } from "./reader.js";
import { MEASURES, aim, bins, words } from "./scale.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 350; // milliseconds to wait after the last keystroke before reading the text

let panels = [];
let scale = null; // { by, bins }
let asked = null; // the requests in flight: { controller, keep, write }
let timer = null;
let linked = location.hash; // the last link we set
const past = []; // texts that Undo restores

// Reading and generating.

/** Let every visible run read the text; with `write`, one run continues it first. */
async function go({ write = false } = {}) {
  clearTimeout(timer);
  const keep = write ? null : (selection() ?? asked?.keep ?? null);
  asked?.controller.abort();
  const mine = (asked = { controller: new AbortController(), keep, write });
  const { signal } = mine.controller;
  report(write ? "Generating…" : "Reading…");
  fail(null);
  busy(write);
  try {
    const writer = write ? (panels.find(({ run }) => run.name === $("writer").value) ?? panels[0]) : null;
    if (write) {
      remember();
      await follow(writer, { text: $("text").value, ...options() }, signal);
      if (signal.aborted) return;
    }
    const others = shown().filter((panel) => panel !== writer);
    await Promise.all(others.map((panel) => follow(panel, { text: $("text").value }, signal)));
    if (mine === asked) report(outcome(writer));
  } finally {
    if (mine === asked) {
      asked = null;
      busy(false);
      if (keep) select(panels[keep.panel], keep.token);
      link();
    }
  }
}

/**
 * Fill a panel with the tokens of a response as they arrive, and the text field with the generated tokens, so that none
 * is lost however the response ends. The panel shows errors, and keeps its content if the request is refused.
 */
async function follow(panel, request, signal) {
  panel.fail(null);
  try {
    const rate = panel.run.dial && value("rate") !== null ? { rate: value("rate") } : {};
    for await (const { run, tokens } of read({ run: panel.run.name, ...request, ...rate }, signal)) {
      if (signal.aborted) return;
      if (run) panel.begin(run);
      if (tokens) panel.add(tokens, scale);
      if (panel.spoken) $("text").value = request.text + panel.spoken;
    }
  } catch (error) {
    if (!signal.aborted) panel.fail(error.message);
  }
  panel.draw();
}

function options() {
  const given = { max_tokens: value("max_tokens"), temperature: value("temperature"), seed: value("seed") };
  return Object.fromEntries(Object.entries(given).filter(([, number]) => number !== null));
}

function value(id) {
  return $(id).value === "" ? null : Number($(id).value);
}

/** Returns what the runs did, in a sentence for each. */
function outcome(writer) {
  const sentence = (panel) => {
    const { run, tokens, written } = panel;
    if (panel !== writer) return `${run.name} read ${plural(tokens.length, "token")}.`;
    const full = tokens.length < run.context ? "" : `, which fills its context of ${run.context}`;
    const end = tokens.at(-1)?.finish === "stop" ? " and ended the document" : full;
    return `${run.name} wrote ${plural(written, "token")}${end}.`;
  };
  return shown().filter((panel) => panel.error.hidden).map(sentence).join(" ");
}

function stop() {
  if (asked?.write) go().then(() => report("Stopped."));
}

/** Save the text for Undo before something other than typing changes it. */
function remember() {
  if (past.at(-1) !== $("text").value) past.push($("text").value);
  enable("undo", past.length);
}

function replace(text) {
  remember();
  $("text").value = text;
}

function undo() {
  if (!past.length) return;
  $("text").value = past.pop();
  enable("undo", past.length);
  go();
}

function busy(writing) {
  enable("write", !writing);
  enable("stop", writing);
  $("text").readOnly = writing;
}

/** Mark a button as enabled or not; unlike a disabled button, it keeps the focus. */
function enable(id, on) {
  $(id).setAttribute("aria-disabled", `${!on}`);
}

function report(message) {
  $("status").textContent = message;
}

function fail(message) {
  $("error").textContent = message ?? "";
  $("error").hidden = !message;
}

// Runs, colours.

function shown() {
  return panels.filter((panel) => !panel.element.hidden);
}

/** Colour all tokens by the selected measure, and draw the legend. */
function recolour() {
  const by = $("by").value;
  const facts = shown().map(({ run }) => run);
  scale = { by, bins: bins(by, facts) };
  panels.forEach((panel) => panel.recolour(scale));
  const swatch = (bin) => make("li", { class: "swatch", "data-step": bin.step }, words(bin, by === "fanout"));
  $("legend").replaceChildren(...scale.bins.map(swatch));
  const aims = [...new Set(facts.filter(({ experts }) => experts).map(aim))];
  $("aim").textContent = by === "fanout" && aims.length ? `target ${aims.join(" and ")}` : "";
}

// The view: which token is open, which expert is pinned.

function selection() {
  const panel = panels.findIndex((each) => each.selected !== null && !each.element.hidden);
  return panel < 0 ? null : { panel, token: panels[panel].selected };
}

/** Open a token of a panel, and the token at the same place in the text in the other panels. */
function select(panel, index, show = false) {
  const open = index === null || panel.selected !== index || !show ? index : null; // a second click closes it
  for (const each of panels) {
    const alike = each.run.tokenizer === panel.run.tokenizer && each.tokens.length === panel.tokens.length;
    const place = each === panel || alike || open === null || open === 0 ? open : each.at(panel.starts[open]);
    each.select(place, show && each === panel);
  }
  link();
}

/** Write the view into the fragment of the URL, which browsers do not send. */
function link() {
  if (asked) return;
  const view = new URLSearchParams({ text: $("text").value });
  const chosen = selection();
  if (chosen) view.set("token", `${chosen.panel}:${chosen.token}`);
  panels.forEach((panel, i) => panel.pinned && view.set("expert", `${i}:${panel.pinned.join(":")}`));
  view.set("by", scale.by);
  if (value("rate") !== null) view.set("rate", value("rate"));
  const hidden = panels.filter((panel) => panel.element.hidden).map(({ run }) => run.name);
  if (hidden.length) view.set("without", hidden.join("\n"));
  linked = `#${view}`;
  history.replaceState(null, "", linked);
}

/** Restore the view from the URL, or show an example, unless the user typed a text while the page loaded. */
async function restore() {
  const view = new URLSearchParams(location.hash.slice(1));
  $("text").value ||= view.get("text") ?? EXAMPLES.Code;
  const plain = panels.some(({ run }) => run.experts) ? "fanout" : "loss";
  $("by").value = Object.hasOwn(MEASURES, view.get("by")) ? view.get("by") : plain;
  $("rate").value = view.get("rate") ?? "";
  const without = (view.get("without") ?? "").split("\n");
  panels.forEach((panel, i) => show(panel, i === 0 || !without.includes(panel.run.name)));
  recolour();
  await go();
  const [panel, token] = (view.get("token") ?? "").split(":").map(Number);
  if (panels[panel] && Number.isInteger(token)) select(panels[panel], token);
  const [of, ...expert] = (view.get("expert") ?? "").split(":").map(Number);
  if (panels[of] && expert.length === 2) panels[of].pin(expert);
}

function show(panel, on) {
  panel.element.hidden = !on;
  const box = [...document.querySelectorAll("#runs input")].find(({ value }) => value === panel.run.name);
  if (box) box.checked = on;
  $("panels").classList.toggle("several", shown().length > 1);
}

// Setting up.

function offerRuns() {
  $("rate-option").hidden = !panels.some(({ run }) => run.dial);
  for (const { run } of panels) $("writer").append(make("option", {}, run.name));
  if (panels.length < 2) return;
  $("writer-option").hidden = false;
  $("runs").hidden = false;
  for (const panel of panels) {
    const box = make("input", { type: "checkbox", value: panel.run.name, checked: true });
    box.addEventListener("change", () => {
      if (!box.checked && shown().length === 1) {
        box.checked = true; // one run stays visible
        return;
      }
      show(panel, box.checked);
      recolour();
      go();
    });
    $("runs").append(make("label", { class: "option" }, box, panel.run.name));
  }
}

function offerExamples() {
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const use = () => {
      replace(text);
      panels.forEach((panel) => panel.select(null));
      go();
    };
    $("examples").append(make("button", { type: "button", class: "quiet", onclick: use }, name));
  }
}

function listen() {
  for (const id of ["text", "rate"]) {
    $(id).addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(go, PAUSE);
    });
  }
  $("controls").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!asked?.write) go({ write: true });
  });
  $("stop").addEventListener("click", stop);
  $("undo").addEventListener("click", undo);
  $("by").addEventListener("change", () => {
    recolour();
    link();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") release();
  });
  addEventListener("hashchange", () => {
    if (location.hash === linked) return;
    replace("");
    restore();
  });
}

/** Undo the latest of: generating, a pinned expert, an open token. */
function release() {
  const pinned = panels.find((panel) => panel.pinned);
  if (asked?.write) stop();
  else if (pinned) pinned.pin(null);
  else if (selection()) select(panels[0], null);
}

async function start() {
  try {
    panels = (await fetchRuns()).map((run) => new Panel(run, { select, pin: link }));
  } catch (error) {
    fail(error.message);
    return;
  }
  $("panels").append(...panels.map(({ element }) => element));
  $("view").hidden = false;
  offerRuns();
  offerExamples();
  listen();
  await restore();
}

start();
