"use strict";
const trace = JSON.parse(document.getElementById("trace").textContent);
const nodes = trace.nodes;
const list = document.getElementById("nodes"), details = document.getElementById("details");
const canvas = document.getElementById("timeline"), told = document.getElementById("told");
const CHUNK = 50, SHOWN = 600, TOKENS = 1000, ROW = 16;
const rows = [];
let current = 0;

function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

function seconds(value) {
  return value < 1 ? (value * 1000).toFixed(value < 0.01 ? 2 : 1) + " ms" : value.toFixed(2) + " s";
}

function spell(text) {  // replaces control characters by visible signs
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "\u2423");
}

function write(where, pieces, most) {
  for (const [text, origin] of pieces) {
    if (most <= 0) { where.append(make("span", "soft", " …")); return; }
    const span = make("span", origin, spell(text.slice(0, most)));
    span.title = origin;
    where.append(span);
    most -= text.length;
  }
}

function branch(path) {
  const parts = [];
  for (let i = 0; i < path.length; i += 2) parts.push("fork " + path[i] + " branch " + path[i + 1]);
  return parts.join(", ") || "main";
}

function label(node) {
  const usage = node.usage;
  let text = node.kind.replace("_", " ") + (node.name === null ? "" : " " + node.name) + ", " + branch(node.path);
  if (usage) text += ", " + usage.completion_tokens + " tokens in " + seconds(node.end - node.start);
  if (node.rejected) text += ", taken back";
  if (node.error) text += ", failed";
  return text + ": " + spell(node.pieces.map((piece) => piece[0]).join("").slice(0, 200));
}

function row(node, index) {
  const element = make("div", "node");
  element.id = "n" + index;
  element.tabIndex = index ? -1 : 0;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", "false");
  element.setAttribute("aria-label", label(node));
  element.style.paddingLeft = 10 + Math.min(node.path.length / 2, 6) * 14 + "px";
  const about = make("div", "about");
  about.append(make("span", "kind", node.kind.replace("_", " ") + (node.name === null ? "" : " " + node.name)));
  if (node.path.length) about.append(make("span", "", branch(node.path)));
  if (node.usage) {
    about.append(make("span", "", seconds(node.end - node.start)));
    about.append(make("span", "", node.usage.prompt_tokens + " in, " + node.usage.cached_tokens + " cached, "
      + node.usage.completion_tokens + " out"));
  }
  if (node.miss) about.append(make("span", "", "not cached: " + node.miss.short));
  if (node.attempts.length) about.append(make("span", "wrong", node.attempts.length + (node.attempts.length > 1 ? " failed attempts" : " failed attempt")));
  if (node.rejected) about.append(make("span", "wrong", "taken back"));
  if (node.error) about.append(make("span", "wrong", spell(node.error.slice(0, 200))));
  element.append(about);
  if (node.pieces.length) {
    const said = make("div", "said");
    write(said, node.pieces, SHOWN);
    element.append(said);
  }
  return element;
}

function field(where, name, value) {
  if (value === null || value === undefined || value === "") return;
  where.append(make("dt", "", name), make("dd", "", spell(String(value))));
}

function known(name, logprob) {
  return typeof logprob === "number" ? name + logprob.toFixed(3) + " (" + percent(logprob) + ")" : "";
}

function percent(logprob) {
  return (Math.exp(logprob) * 100).toPrecision(3) + " %";
}

function describe(node) {
  details.replaceChildren(make("h2", "", node.kind.replace("_", " ") + (node.name === null ? "" : " " + node.name)));
  const facts = make("dl");
  field(facts, "line", node.where);
  field(facts, "branch", branch(node.path) + ", node " + node.place);
  field(facts, "time", seconds(node.start) + " to " + seconds(node.end));
  if (node.usage) {
    const u = node.usage;
    field(facts, "tokens", u.prompt_tokens + " in, " + u.cached_tokens + " cached, " + u.completion_tokens + " out, "
      + u.forced_tokens + " forced");
    field(facts, "thrown away", node.thrown || "");
    if (u.total_s) field(facts, "queue, first token", seconds(u.queue_s) + ", " + seconds(u.first_token_s));
    if (u.total_s && u.completion_tokens > 1) {
      field(facts, "per token", seconds((u.total_s - u.first_token_s) / (u.completion_tokens - 1)));
    }
  }
  field(facts, "ended by", node.finish);
  if (node.sure) {
    field(facts, "how sure", percent(node.sure.logprob) + " under its constraint, to which the model itself gave "
      + percent(node.sure.mass));
  }
  field(facts, "cost", node.cost);
  field(facts, "error", node.error);
  details.append(facts);
  if (node.miss) {
    details.append(make("h2", "", "Why tokens were not cached"), make("p", "soft", node.miss.long));
    for (const side of ["before", "now"]) {
      if (!node.miss[side]) continue;
      details.append(make("p", "soft", side === "now" ? "this prompt" : "the cache"));
      details.append(make("div", "said", spell(node.miss[side])));
    }
  }
  if (node.pieces.length) {
    details.append(make("h2", "", "Text"));
    const said = make("div", "said");
    write(said, node.pieces, Infinity);
    if (node.cut) said.append(make("p", "wrong", node.cut.toLocaleString("en") + " more characters: see the trace's file."));
    details.append(said);
  }
  if (node.choices.length) {
    details.append(make("h2", "", "Probabilities"));
    for (const [text, share] of node.choices) {
      const line = make("div", "choice");
      const meter = make("meter");
      meter.value = share;
      meter.setAttribute("aria-label", spell(text) + ": " + (share * 100).toFixed(1) + " %");
      line.append(make("span", "", spell(text)), make("span", "", (share * 100).toFixed(1) + " %"), meter);
      details.append(line);
    }
  }
  if (node.tokens.length) {
    details.append(make("h2", "", "Tokens"));
    const tokens = make("div", "tokens");
    for (const token of node.tokens.slice(0, TOKENS)) {
      const text = token.text === undefined ? "" : spell(token.text);
      const shown = make("span", "token", text || String(token.id));
      shown.tabIndex = 0;
      shown.title = "id " + token.id + known(", log-probability ", token.drawn) + known(", the model's own ", token.own)
        + known(", of all that was allowed ", token.allowed);
      shown.setAttribute("aria-label", (text && text + ", ") + shown.title);
      tokens.append(shown);
    }
    if (node.tokens.length > TOKENS) tokens.append(make("span", "soft", node.tokens.length - TOKENS + " more"));
    details.append(tokens);
  }
  for (const attempt of node.attempts) {
    details.append(make("h2", "", "Failed attempt"), make("p", "wrong", spell(attempt.error)));
    for (const text of attempt.texts) {
      const said = make("div", "said");
      write(said, [[text, "rejected"]], Infinity);
      details.append(said);
    }
  }
}

function choose(index, focus) {
  if (!nodes.length) return;
  rows[current].tabIndex = -1;
  rows[current].setAttribute("aria-selected", "false");
  current = Math.min(Math.max(index, 0), nodes.length - 1);
  rows[current].tabIndex = 0;
  rows[current].setAttribute("aria-selected", "true");
  if (focus) rows[current].focus();
  describe(nodes[current]);
  draw();
}

// --------------------------------------------------------------------------------------------- branches over time

const lanes = new Map();
for (const node of nodes) {
  const key = node.path.join("/");
  if (!lanes.has(key)) lanes.set(key, lanes.size);
}
const laneHeight = Math.max(3, Math.min(ROW, Math.floor(8000 / Math.max(lanes.size, 1))));
const boxes = [];  // [index of the node, left, right, lane]; left and right are fractions of the width
const whole = trace.seconds || 1;
nodes.forEach((node, index) => {
  if (node.usage || node.error) boxes.push([index, node.start / whole, node.end / whole, lanes.get(node.path.join("/"))]);
});

function draw() {
  const width = canvas.clientWidth, height = lanes.size * laneHeight + 2, scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  paint.scale(scale, scale);
  for (const [index, left, right, lane] of boxes) {
    const node = nodes[index];
    const kind = node.error || node.rejected ? "rejected" : node.kind === "select" ? "chosen" : "generated";
    paint.fillStyle = style.getPropertyValue(index === current ? "--focus" : "--" + kind + "-line");
    paint.fillRect(left * width, lane * laneHeight + 2, Math.max((right - left) * width, 2), laneHeight - 2);
  }
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width, lane = Math.floor((event.clientY - box.top) / laneHeight);
  let found = null, nearest = 8 / box.width;
  for (const [index, left, right, its] of boxes) {
    const away = Math.max(left - at, at - right, 0);
    if (its === lane && away < nearest) { found = index; nearest = away; }
  }
  return found;
}

canvas.addEventListener("pointermove", (event) => {
  const index = under(event);
  told.textContent = index === null ? "" : label(nodes[index]);
});
canvas.addEventListener("click", (event) => {
  const index = under(event);
  if (index !== null) choose(index, true);
});
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// ------------------------------------------------------------------------------------------------------ the nodes

let chunk = null;
nodes.forEach((node, index) => {
  if (index % CHUNK === 0) {
    chunk = make("div", "chunk");
    chunk.setAttribute("role", "presentation");
    list.append(chunk);
  }
  rows.push(row(node, index));
  chunk.append(rows[index]);
});
list.addEventListener("click", (event) => {
  const found = event.target.closest(".node");
  if (found) choose(Number(found.id.slice(1)), true);
});
list.addEventListener("focusin", (event) => {
  const index = Number(event.target.id.slice(1));
  if (index !== current) choose(index, false);
});
const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 };
list.addEventListener("keydown", (event) => {
  if (!(event.key in MOVES) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  choose(current + MOVES[event.key], true);
});
choose(0, false);
document.documentElement.dataset.ready = "yes";
