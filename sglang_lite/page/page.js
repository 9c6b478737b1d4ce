"use strict";
const at = (id) => document.getElementById(id);
const list = at("nodes"), details = at("details"), canvas = at("timeline"), narrow = window.matchMedia("(max-width: 820px)");
const SHOWN = 2000, TOKENS = 1000, FOUND = 1000, MANY = 500, LANE = 18, AXIS = 20, LETTERS = ["A", "B"];
const ANSWERS = ["gen", "select"];
let runs = [], items = [], current = null;
const extras = [];  // functions that add to the details of a node: of the playground

// ------------------------------------------------------------------------------------------------------- elements

function make(tag, kind, ...content) {  // texts of programs and models only ever become text nodes
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...content);
  return element;
}

function spell(text) {  // replaces control characters by visible signs
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "\u2423");
}

function seconds(value) {
  return value < 1 ? Number((value * 1000).toPrecision(3)) + " ms" : Number(value.toPrecision(4)) + " s";
}

function percent(share) {
  return (share * 100).toPrecision(3) + " %";
}

function write(where, pieces, most) {
  for (const [text, origin] of pieces) {
    if (most <= 0) return where.append(make("span", "soft", " …"));
    const span = make("span", origin, spell(text.slice(0, most)));
    span.title = origin;
    where.append(span);
    most -= text.length;
  }
}

function folded(title, ...content) {
  return make("details", "template", make("summary", "", title), ...content);
}

// ---------------------------------------------------------------------------------------------- nodes and their names

function prepare(run, number) {  // adds to each node what the page needs to know of its branch
  run.letter = LETTERS[number];
  run.branches = new Map();
  run.forked = new Map();
  run.keys = new Map();
  run.nodes.forEach((node, index) => {
    const branch = node.path.join("/");
    if (!run.branches.has(branch)) {
      const fork = node.path.slice(0, -1).join("/");
      run.branches.set(branch, []);
      if (!run.forked.has(fork)) run.forked.set(fork, []);
      run.forked.get(fork).push(branch);
    }
    run.branches.get(branch).push(node);
    node.run = run;
    node.id = "n" + number + "-" + index;
    node.key = branch + ":" + node.place + ":" + node.kind;
    node.text = node.pieces.map((piece) => piece[0]).join("");
    run.keys.set(node.key, node);
  });
  const ended = new Map();
  for (const [branch, nodes] of run.branches) {
    let last = ended.get(branch);
    nodes.forEach((node, i) => {
      const before = nodes[i - 1], after = nodes[i + 1];
      if (node.kind !== "text") node.template = "";
      else if (after && after.kind === "turn_begin" && after.where === node.where) node.template = "begin";
      else if (before && before.kind === "turn_end" && before.where === node.where) node.template = "end";
      if (ANSWERS.includes(node.kind)) {
        const gap = last === undefined ? 0 : node.start - last;
        node.pause = gap > Math.max(0.005, run.seconds / 100) ? gap : 0;
        node.since = last;
      }
      if (ANSWERS.includes(node.kind) || node.kind === "join") last = Math.max(last ?? 0, node.end);
      if (node.kind === "fork") for (const child of children(node)) ended.set(child, last);
    });
  }
}

function children(fork) {  // branches of a fork that have nodes
  return fork.run.forked.get([...fork.path, fork.place].join("/")) || [];
}

function counterpart(node) {
  const other = runs.find((run) => run !== node.run);
  return other && other.keys.get(node.key);
}

function differs(node) {
  const other = counterpart(node);
  return runs.length > 1 && !node.template && (!other || other.text !== node.text);
}

function branchName(path) {
  const parts = [];
  for (let i = 0; i < path.length; i += 2) parts.push("fork " + path[i] + " branch " + path[i + 1]);
  return parts.join(", ") || "main";
}

const KINDS = {
  scope_begin: "scope", scope_end: "end of scope", grammar_begin: "grammar", grammar_end: "end of grammar",
  turn_begin: "turn", turn_end: "end of turn", mark: "checkpoint", rollback: "rolled back", join: "joined",
};

function title(node) {
  return (KINDS[node.kind] || node.kind) + (node.name === null ? "" : " " + spell(node.name));
}

function cost(node) {
  const u = node.usage, parts = [seconds(node.end - node.start)];
  if (u && u.completion_tokens) parts.push(u.completion_tokens + " tokens");
  if (u && u.prompt_tokens) parts.push(u.cached_tokens + " of " + u.prompt_tokens + " cached" + moved(u));
  return parts.join(", ");
}

function moved(u) {  // what had to be brought to the device
  const parts = [[u.host_tokens, " from the host"], [u.disk_tokens, " from files"]].filter(([count]) => count);
  return parts.length ? " (" + parts.map(([count, where]) => count + where).join(", ") + ")" : "";
}

function label(node) {
  let text = (runs.length > 1 ? node.run.letter + ", " : "") + title(node) + ", " + branchName(node.path);
  if (node.usage) text += ", " + cost(node);
  if (node.pause) text += ", after a pause of " + seconds(node.pause);
  if (node.rejected) text += ", taken back";
  if (node.error) text += ", failed";
  return text + ": " + spell(node.text.slice(0, 200));
}

// ------------------------------------------------------------------------------------------------- the conversation

function button(node, most) {
  const element = make("span", "node " + node.kind + (differs(node) ? " differs" : ""));
  element.id = node.id;
  element.tabIndex = -1;
  element.setAttribute("role", "button");
  element.setAttribute("aria-label", label(node));
  if (node.image) element.append(picture(node));
  else if (node.pieces.length) write(element, node.pieces, most);
  else element.append(make("span", "mark", ANSWERS.includes(node.kind) ? title(node) + " (nothing)" : title(node)));
  node.element = element;
  items.push(node);
  return element;
}

function picture(node) {
  if (!node.thumbnail) return make("span", "mark", "image " + spell(node.image));
  const element = make("img");
  element.src = node.thumbnail;
  element.alt = "image " + node.image;
  return element;
}

function notes(node) {  // what is said of a node above its bubble
  const found = [];
  if (node.pause) found.push(make("span", "paused", "paused " + seconds(node.pause)));
  found.push(make("span", "", make("b", "", spell(node.name ?? node.kind)), " " + cost(node)));
  if (node.adapter) found.push(make("span", "", "adapter " + spell(node.adapter)));
  if (node.miss) found.push(make("span", "", "not cached: " + node.miss.short));
  if (node.attempts.length) found.push(make("span", "wrong", node.attempts.length + " failed attempts"));
  if (node.rejected) found.push(make("span", "wrong", "taken back"));
  if (node.error) found.push(make("span", "wrong", spell(node.error.slice(0, 200))));
  return found;
}

function blocks(run, branch, role) {  // elements of a branch: bubbles, and columns of the branches forked from it
  const found = [], before = [], nodes = run.branches.get(branch) || [];
  let bubble = null;
  const open = () => {
    if (bubble) return bubble;
    bubble = make("div", "bubble " + (["system", "user", "assistant"].includes(role) ? role : "other"));
    bubble.about = make("div", "about", ...(role ? [make("span", "role", spell(role))] : []));
    bubble.said = make("div", "said");
    bubble.append(bubble.about, bubble.said);
    found.push(bubble);
    return bubble;
  };
  const close = (next) => { [bubble, role] = [null, next]; };
  const fold = (node) => {
    if (!bubble.fold) bubble.about.append(folded("template", bubble.fold = make("div", "said")));
    write(bubble.fold, node.pieces, SHOWN);
  };
  nodes.forEach((node, i) => {
    if (node.template === "begin") before.push(node);
    else if (node.template === "end") {
      if (bubble) fold(node);
      close("");
    } else if (node.kind === "turn_begin") {
      close(node.name || "turn");
      open();
      before.splice(0).forEach(fold);
    } else if (node.kind === "turn_end") {
      if (!nodes[i + 1] || nodes[i + 1].template !== "end") close("");
    } else if (node.kind === "fork") {
      found.push(make("div", "columns", ...children(node).map((child) =>
        make("div", "column", make("div", "soft", "branch " + child.slice(child.lastIndexOf("/") + 1)), ...blocks(run, child, role)))));
      bubble = null;
    } else if (node.image || node.pieces.length || ANSWERS.includes(node.kind) || node.error) {
      open().said.append(button(node, SHOWN));
      if (ANSWERS.includes(node.kind) || node.error) bubble.about.append(...notes(node));
      if (ANSWERS.includes(node.kind) && !role) close("");  // outside of turns each answer has a bubble, with the text before it
    } else if (bubble) bubble.said.append(button(node, SHOWN));
    else found.push(make("div", "marks", button(node, SHOWN)));
  });
  return found;
}

function conversation() {
  const sides = runs.map((run) => blocks(run, "", ""));
  if (sides.length < 2) return sides[0] || [];
  const rows = [];
  for (let i = 0; i < Math.max(sides[0].length, sides[1].length); i++) {
    rows.push(make("div", "pair", ...sides.map((side, j) => {
      const place = make("div", "side", ...(side[i] ? [side[i]] : []));
      place.dataset.run = LETTERS[j];
      return place;
    })));
  }
  return rows;
}

function slowest() {
  const answered = runs.flatMap((run) => run.nodes.filter((node) => ANSWERS.includes(node.kind)));
  answered.sort((a, b) => (b.end - b.start) - (a.end - a.start));
  const most = answered.length ? answered[0].end - answered[0].start || 1 : 1;
  return answered.map((node) => {
    const bar = make("meter");
    bar.value = (node.end - node.start) / most;
    bar.setAttribute("aria-label", "share of the slowest: " + percent(bar.value));
    const about = make("div", "about", ...(runs.length > 1 ? [make("span", "role", node.run.letter)] : []),
      ...notes(node), make("span", "", branchName(node.path)));
    return make("div", "bubble other", about, bar, make("div", "said", button(node, 300)));
  });
}

const FILTERS = {
  all: () => true,
  gen: (node) => node.kind === "gen",
  select: (node) => node.kind === "select",
  failed: (node) => node.error || node.rejected || node.attempts.length,
  miss: (node) => node.miss,
  pause: (node) => node.pause || (node.usage && node.usage.queue_s > Math.max(0.005, node.run.seconds / 100)),
  differs,
};

function arrange() {  // shows bubbles in the chosen order, without those in which the filter or the search finds nothing
  items = [];
  const all = at("order").value === "slowest" ? slowest() : conversation();
  const query = at("search").value.toLowerCase(), wanted = FILTERS[at("filter").value];
  const fits = (node) => wanted(node) && (!query
    || [node.text, node.name, node.error, node.where].some((each) => (each || "").toLowerCase().includes(query)));
  const kept = items.filter(fits);
  if (kept.length < items.length) {
    const shown = new Set(kept.map((node) => node.element));
    const prune = (element) => {
      if (element.classList.contains("node")) return shown.has(element);
      if (element.classList.contains("said") && element.closest(".template") === null) {
        return [...element.children].some((each) => shown.has(each));
      }
      const some = [...element.children].map(prune).some(Boolean);
      element.hidden = !some && element.matches(".bubble, .columns, .column, .marks, .pair");
      return some;
    };
    all.forEach(prune);
  }
  items = items.filter((node) => !node.element.closest("[hidden]"));  // also what stands beside those in a bubble
  list.replaceChildren(...all);
  const of = runs.reduce((sum, run) => sum + run.nodes.length, 0);
  at("count").textContent = kept.length + " of " + of + " nodes, others folded or left out";
  mark(query);
  if (current && items.includes(current)) choose(current, false);
  else if (items.length) items[0].element.tabIndex = 0;
}

function mark(query) {
  if (!window.CSS || !CSS.highlights) return;
  CSS.highlights.delete("found");
  if (!query) return;
  const ranges = [], texts = document.createTreeWalker(list, NodeFilter.SHOW_TEXT);
  while (texts.nextNode() && ranges.length < FOUND) {
    const place = texts.currentNode.data.toLowerCase().indexOf(query);
    if (place < 0) continue;
    const range = new Range();
    range.setStart(texts.currentNode, place);
    range.setEnd(texts.currentNode, Math.min(place + query.length, texts.currentNode.length));
    ranges.push(range);
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

// ------------------------------------------------------------------------------------------------------ the details

function field(where, name, value) {
  if (value === null || value === undefined || value === "") return;
  where.append(make("dt", "", name), make("dd", "", spell(String(value))));
}

function known(name, logprob) {
  return typeof logprob === "number" ? name + percent(Math.exp(logprob)) : "";
}

function facts(node) {
  const found = make("dl"), u = node.usage;
  field(found, "line", node.where);
  field(found, "branch", branchName(node.path) + ", node " + node.place);
  field(found, "time", seconds(node.start) + " to " + seconds(node.end));
  field(found, "pause before", node.pause ? seconds(node.pause) : "");
  if (u) {
    field(found, "tokens", u.prompt_tokens + " in, " + u.cached_tokens + " cached" + moved(u) + ", " + u.completion_tokens + " out, "
      + u.forced_tokens + " forced");
    field(found, "thrown away", node.thrown || "");
    if (u.total_s) field(found, "queue, first token", seconds(u.queue_s) + ", " + seconds(u.first_token_s));
    if (u.total_s && u.completion_tokens > 1) {
      field(found, "per token", seconds((u.total_s - u.first_token_s) / (u.completion_tokens - 1)));
    }
  }
  field(found, "ended by", node.finish);
  if (node.sure) {
    field(found, "how sure", percent(Math.exp(node.sure.logprob)) + " under its constraint, to which the model itself "
      + "gave " + percent(Math.exp(node.sure.mass)));
  }
  field(found, "cost", node.cost);
  field(found, "error", node.error);
  return found;
}

function bars(shares) {  // texts with their shares between 0 and 1
  return shares.map(([text, share]) => {
    const meter = make("meter");
    meter.value = share;
    meter.setAttribute("aria-label", spell(text) + ": " + percent(share));
    return make("div", "choice", make("span", "", spell(text)), make("span", "", percent(share)), meter);
  });
}

function tokens(node) {
  const told = make("div", "token-facts"), shown = make("div", "tokens");
  told.setAttribute("role", "status");
  for (const token of node.tokens.slice(0, TOKENS)) {
    const text = token.text === undefined ? "" : spell(token.text), chip = make("button", "token", text || String(token.id));
    const about = "id " + token.id + known(", probability ", token.drawn) + known(", the model's own ", token.own)
      + known(", its constraint allowed ", token.allowed);
    chip.type = "button";
    chip.title = about;
    if (typeof token.allowed === "number" && token.allowed < -0.01) chip.classList.add("masked");
    const tell = () => told.replaceChildren(make("p", "", (text && text + ": ") + about),
      ...bars((token.top || []).map(([text, logprob]) => [text, Math.exp(logprob)])));
    chip.addEventListener("focus", tell);
    chip.addEventListener("click", tell);
    shown.append(chip);
  }
  if (node.tokens.length > TOKENS) shown.append(make("span", "soft", node.tokens.length - TOKENS + " more"));
  return [make("h2", "", "Tokens"), make("p", "soft", "Those with a thick edge: a constraint left others out."), shown, told];
}

function compared(node) {
  const other = counterpart(node);
  if (!other) return [make("h2", "", "The other run"), make("p", "soft", "has no such node.")];
  const said = make("div", "said"), same = other.text === node.text;
  if (!same) write(said, other.pieces, Infinity);
  return [make("h2", "", "Run " + other.run.letter), make("p", "soft", (same ? "the same text, " : "another text, ") + cost(other)),
    ...(same ? [] : [said])];
}

function describe(node) {
  const shut = make("button", "shut", "close"), parts = [];
  shut.type = "button";
  shut.addEventListener("click", () => { details.replaceChildren(); node.element.focus(); });
  if (node.miss) {
    parts.push(make("h2", "", "Why tokens were not cached"), make("p", "soft", node.miss.long));
    for (const side of ["before", "now"]) {
      if (!node.miss[side]) continue;
      parts.push(make("p", "soft", side === "now" ? "this prompt" : "the cache"), make("div", "said", spell(node.miss[side])));
    }
  }
  if (node.image) parts.push(make("h2", "", "Image"), make("p", "soft", spell(node.image)));
  if (node.pieces.length) {
    const said = make("div", "said");
    write(said, node.pieces, Infinity);
    if (node.cut) said.append(make("p", "wrong", node.cut.toLocaleString("en") + " more characters: see the trace's file."));
    parts.push(make("h2", "", "Text"), said);
  }
  if (node.choices.length) parts.push(make("h2", "", "Probabilities"), ...bars(node.choices));
  if (node.tokens.length) parts.push(...tokens(node));
  for (const attempt of node.attempts) {
    parts.push(make("h2", "", "Failed attempt"), make("p", "wrong", spell(attempt.error)));
    for (const text of attempt.texts) {
      const said = make("div", "said");
      write(said, [[text, "rejected"]], Infinity);
      parts.push(said);
    }
  }
  details.replaceChildren(shut, make("h2", "", (runs.length > 1 ? node.run.letter + ": " : "") + title(node)), facts(node),
    ...extras.flatMap((extra) => extra(node)), ...(runs.length > 1 ? compared(node) : []), ...parts);
}

function choose(node, focus) {
  if (current && current.element) {
    current.element.tabIndex = -1;
    current.element.removeAttribute("aria-current");
  }
  current = node;
  node.element.tabIndex = 0;
  node.element.setAttribute("aria-current", "true");
  if (focus) node.element.focus();
  describe(node);
  draw();
}

// --------------------------------------------------------------------------------------------- branches over time

let lanes = new Map(), boxes = [], whole = 1, lane = LANE;  // boxes: [node, lane]

function laneOf(node) {
  return node.run.letter + "/" + node.path.join("/");
}

function layOut() {
  [lanes, boxes] = [new Map(), []];
  whole = Math.max(...runs.map((run) => run.seconds), 1e-6);
  for (const run of runs) {
    for (const node of run.nodes) {
      if (!lanes.has(laneOf(node))) lanes.set(laneOf(node), [lanes.size, node]);
      if (node.usage || node.error) boxes.push(node);
    }
  }
  lane = Math.max(3, Math.min(LANE, Math.floor(8000 / Math.max(lanes.size, 1))));
}

function ticks() {
  const about = whole / (narrow.matches ? 3 : 8), power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= about);
  return Array.from({ length: Math.floor(whole / step) + 1 }, (_, i) => i * step);
}

function margin() {
  return narrow.matches ? 54 : 120;
}

function draw() {
  const width = canvas.clientWidth, height = AXIS + lanes.size * lane + 2, scale = window.devicePixelRatio || 1;
  const left = margin(), right = width - 34, x = (time) => left + (time / whole) * (right - left);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name);
  paint.scale(scale, scale);
  paint.font = "11px system-ui, sans-serif";
  paint.textBaseline = "middle";
  for (const time of ticks()) {
    paint.fillStyle = colour("line");
    paint.fillRect(x(time), AXIS - 4, 1, height);
  }
  paint.fillStyle = colour("soft");
  for (const [number, node] of lanes.values()) {
    if (lane < 12) break;
    const letter = runs.length > 1 ? node.run.letter + " " : "", path = node.path.join(".");
    paint.fillText(letter + (narrow.matches ? path || "main" : path ? "branch " + path : "main"), 6, AXIS + number * lane + lane / 2);
  }
  for (const node of boxes) {
    const top = AXIS + lanes.get(laneOf(node))[0] * lane + 2, high = lane - 4 > 0 ? lane - 4 : 1;
    const bar = (from, to, name) => {
      paint.fillStyle = colour(name);
      paint.fillRect(x(from), top, Math.max(x(to) - x(from), 2), high);
    };
    const u = node.usage || {}, first = Math.min(node.start + (u.first_token_s || 0), node.end);
    if (node.pause) {
      paint.fillStyle = colour("bar");
      paint.fillRect(x(node.since), top + high / 2, x(node.start) - x(node.since), 1);
    }
    bar(node.start, node.end, node.error || node.rejected ? "rejected-line" : node.kind === "select" ? "chosen-line" : "generated-line");
    if (first > node.start && node.kind === "gen") bar(node.start, first, "cached-line");
    if (u.queue_s > 0) bar(node.start, Math.min(node.start + u.queue_s, node.end), "bar");
    if (node === current) {
      paint.strokeStyle = colour("ink");
      paint.lineWidth = 2;
      paint.strokeRect(x(node.start) - 1, top - 1, Math.max(x(node.end) - x(node.start), 2) + 2, high + 2);
    }
  }
  const shown = canvas.parentElement.scrollTop;  // the axis stays in sight
  paint.fillStyle = colour("raised");
  paint.fillRect(0, shown, width, AXIS - 3);
  paint.fillStyle = colour("soft");
  paint.textAlign = "center";
  for (const time of ticks()) paint.fillText(seconds(time), x(time), shown + 9);
}

function under(event) {
  const box = canvas.getBoundingClientRect(), left = margin(), span = box.width - 34 - left;
  const time = ((event.clientX - box.left - left) / span) * whole, number = Math.floor((event.clientY - box.top - AXIS) / lane);
  let found = null, nearest = (8 / span) * whole;
  for (const node of boxes) {
    const away = Math.max(node.start - time, time - node.end, 0);
    if (lanes.get(laneOf(node))[0] === number && away < nearest) [found, nearest] = [node, away];
  }
  return found;
}

// ---------------------------------------------------------------------------------------------------------- the page

function about(run) {
  const totals = make("dl", "totals"), given = make("dl", "arguments");
  for (const [name, value] of run.totals) totals.append(make("div", "", make("dt", "", name), make("dd", "", value)));
  for (const [name, text] of run.arguments) {
    const value = make("dd", "", ...(text.length > 120 ? [folded(spell(text.slice(0, 120)) + " …", make("div", "said", spell(text)))] : [spell(text)]));
    given.append(make("dt", "", spell(name)), value);
  }
  return make("div", "run", make("p", "soft", spell((runs.length > 1 ? run.letter + ": " + run.title + ", " : "") + run.backend)),
    ...(run.arguments.length ? [given] : []), totals);
}

function show(shown) {  // at most two runs
  runs = shown;
  runs.forEach(prepare);
  current = null;
  details.replaceChildren();
  list.classList.toggle("two", runs.length > 1);
  list.classList.toggle("many", runs.reduce((sum, run) => sum + run.nodes.length, 0) > MANY);
  at("about").replaceChildren(...runs.map(about));
  for (const option of at("filter").options) if (option.value === "differs") option.hidden = runs.length < 2;
  layOut();
  arrange();
  const first = items.find((node) => ANSWERS.includes(node.kind)) || items[0];
  if (first && !narrow.matches) choose(first, false);
  else draw();
}

const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 };
const chosen = (event) => items.find((node) => node.element === event.target.closest(".node"));
list.addEventListener("click", (event) => {
  const node = chosen(event);
  if (node) choose(node, true);
});
list.addEventListener("focusin", (event) => {
  const node = chosen(event);
  if (node && node !== current) choose(node, false);
});
list.addEventListener("keydown", (event) => {
  const node = chosen(event);
  if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in MOVES) choose(items[Math.min(Math.max(items.indexOf(node) + MOVES[event.key], 0), items.length - 1)], true);
  else if (event.key === "Enter" || event.key === " ") { choose(node, false); details.focus(); }
  else return;
  event.preventDefault();
});
details.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && current) current.element.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
  event.preventDefault();
  at("search").focus();
});
for (const name of ["search", "filter", "order"]) at(name).addEventListener("input", arrange);
canvas.addEventListener("pointermove", (event) => {
  const node = under(event);
  at("told").textContent = node ? label(node) : "";
});
canvas.addEventListener("click", (event) => {
  const node = under(event);
  if (node && items.includes(node)) choose(node, true);
});
window.addEventListener("resize", draw);
canvas.parentElement.addEventListener("scroll", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
show(JSON.parse(at("runs").textContent));
document.documentElement.dataset.ready = "yes";
