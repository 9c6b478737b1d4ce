
// ------------------------------------------------------------------------------------------------------ playground

const token = new URLSearchParams(location.search).get("token") || "";
const past = new Map();  // runs by their numbers
const KIND_NAMES = { prompt: "prompt", json_schema: "JSON schema", regex: "regex", ebnf: "grammar" };
let described = { programs: [], texts: [] }, inputs = [];

async function ask(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST", headers: { "content-type": "application/json", "x-token": token }, body: JSON.stringify(body),
    });
    return await answer.json();
  } catch (error) {
    return { error: { text: "The playground does not answer: is it still running? (" + error.message + ")" } };
  }
}

function fail(error) {
  const parts = error ? [make("b", "", spell(error.text))] : [];
  if (error && error.line) parts.push(make("pre", "", "line " + error.line + ": " + spell(error.code)));
  at("failed").replaceChildren(...parts);
}

function input(name, text, rows) {
  const area = make("textarea");
  area.value = text;
  area.rows = Math.min(Math.max(text.split("\n").length, rows), 14);
  area.spellcheck = false;
  return make("label", "", name, area);
}

function fields() {  // of the chosen program: its arguments, and its texts with those outside of all programs
  const program = described.programs.find((each) => each.name === at("program").value);
  if (!program) return;
  inputs = [];
  const shown = program.parameters.map((each) => {
    const label = input("argument " + each.name, each.text, 1);
    inputs.push({ argument: each.name, area: label.querySelector("textarea") });
    return label;
  });
  described.texts.forEach((text, place) => {
    if (text.program !== program.name && text.program !== "") return;
    const label = input(KIND_NAMES[text.kind] + ", line " + text.line, text.text, 1), area = label.querySelector("textarea");
    inputs.push({ place, area, text: text.text });
    area.addEventListener("input", () => label.classList.toggle("changed", area.value !== text.text));
    if (text.kind === "prompt") return shown.push(label);
    const told = make("div", "report");
    told.setAttribute("role", "status");
    const check = async () => {
      const typed = area.value, found = await ask("check", { kind: text.kind, text: typed });
      if (typed === area.value) told.replaceChildren(...reported(found));
    };
    let waiting = 0;
    area.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(check, 150); });
    check();
    shown.push(make("div", "", label, told));
  });
  at("fields").replaceChildren(...shown);
}

function reported(found) {
  if (found.error) return [make("div", "wrong", spell(found.error.text))];
  const lines = [...found.refused.map(([pointer, reason]) => make("div", "wrong", spell(("refused: " + pointer + " ").trimEnd() + " " + reason))),
    ...found.checked.map(([pointer, reason]) => make("div", "", spell("checked afterwards: " + pointer + " " + reason)))];
  if (found.remarks.length) lines.push(make("div", "", spell("no effect: " + found.remarks.join(", "))));
  if (!found.refused.length) lines.push(make("div", "", spell(found.rules + (found.rules === 1 ? " rule" : " rules") + (found.example === null ? "" : ", for example " + found.example))));
  return lines;
}

async function describePrograms() {
  const found = await ask("programs", {}), before = at("program").value;
  fail(found.error);
  if (found.error) return;
  described = found;
  at("program").replaceChildren(...found.programs.map((each) => make("option", "", each.name)));
  if (found.programs.some((each) => each.name === before)) at("program").value = before;
  fields();
}

function listed() {
  const shown = [runs[0], runs[1]].map((run) => [...past].find(([, each]) => each === run));
  for (const [i, id] of [[0, "shown"], [1, "beside"]]) {
    at(id).replaceChildren(make("option", "", "–"), ...[...past.keys()].map((number) => make("option", "", String(number))));
    at(id).value = shown[i] ? String(shown[i][0]) : "–";
  }
}

function display(...numbers) {
  show([...new Set(numbers)].map((number) => past.get(Number(number))).filter(Boolean));
  listed();
}

async function run(path, body, beside) {
  at("state").textContent = "running …";
  const button = at("panel").querySelector("button");
  button.disabled = true;
  const found = await ask(path, body);
  button.disabled = false;
  at("state").textContent = found.run ? "run " + found.run + " took " + seconds(found.seconds) : "failed";
  if (found.changed) await describePrograms();
  fail(found.error);
  if (!found.run) return;
  past.set(found.run, found.data);
  found.data.number = found.run;
  if (past.size > 20) past.delete(past.keys().next().value);
  display(...(beside ? [beside, found.run] : [found.run, at("beside").value]));
}

extras.push((node) => {
  if (!ANSWERS.includes(node.kind) || node.name === null) return [];
  const form = make("form"), label = input("another answer for " + spell(node.name), node.text, 2), again = make("button", "", "Ask again");
  again.type = "button";
  form.append(label, make("button", "", "Go on with this answer"), again);
  const rerun = (value) => run("rerun", { run: node.run.number, at: node.name, value }, node.run.number);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    rerun(label.querySelector("textarea").value);
  });
  again.addEventListener("click", () => rerun(null));
  return [form];
});

at("panel").addEventListener("submit", (event) => {
  event.preventDefault();
  const asked = { version: described.version, program: at("program").value, arguments: {}, edits: {} }, seed = at("seed").value.trim();
  if (seed) asked.seed = Number(seed);
  for (const { argument, place, area, text } of inputs) {
    if (argument !== undefined) asked.arguments[argument] = area.value;
    else if (area.value !== text) asked.edits[place] = area.value;
  }
  run("run", asked);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  const form = event.target.closest("form") || at("panel");
  event.preventDefault();
  form.requestSubmit();
});
at("program").addEventListener("input", fields);
for (const id of ["shown", "beside"]) at(id).addEventListener("input", () => display(at("shown").value, at("beside").value));
describePrograms();
