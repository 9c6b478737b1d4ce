
// ------------------------------------------------------------------------------------ what panels above the runs share

const token = new URLSearchParams(location.search).get("token") || "";
const past = new Map();  // runs by their numbers
const KIND_NAMES = { prompt: "prompt", json_schema: "JSON schema", regex: "regex", ebnf: "grammar" };
let last = 0;
let reload = async () => {};  // called when what the page edits has changed

async function ask(path, body) {
  try {
    const answer = await fetch((at("panel").dataset.base || "") + path, {
      method: "POST", headers: { "content-type": "application/json", "x-token": token }, body: JSON.stringify(body),
    });
    return await answer.json();
  } catch (error) {
    return { error: { text: "The server does not answer: is it still running? (" + error.message + ")" } };
  }
}

function fail(error) {
  const parts = error ? [make("b", "", spell(error.text || error.message))] : [];
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

function checked(label, kind) {  // a constraint's text, with a report below it while it is typed
  const told = make("div", "report"), area = label.querySelector("textarea");
  let waiting = 0;
  told.setAttribute("role", "status");
  const check = async () => {
    const typed = area.value, found = await ask("check", { kind: kind(), text: typed });
    if (typed === area.value) told.replaceChildren(...reported(found));
  };
  area.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(check, 150); });
  check();
  return make("div", "", label, told);
}

function reported(found) {
  if (found.error) return [make("div", "wrong", spell(found.error.text || found.error.message))];
  const lines = [
    ...found.refused.map(([pointer, reason]) => make("div", "wrong", spell(["refused:", pointer, reason].filter(Boolean).join(" ")))),
    ...found.checked.map(([pointer, reason]) => make("div", "", spell("checked afterwards: " + pointer + " " + reason))),
  ];
  if (found.remarks.length) lines.push(make("div", "", spell("no effect: " + found.remarks.join(", "))));
  const example = found.example === null ? "" : ", for example " + found.example;
  if (!found.refused.length) lines.push(make("div", "", spell(found.rules + (found.rules === 1 ? " rule" : " rules") + example)));
  return lines;
}

function display(...numbers) {
  show([...new Set(numbers)].map((number) => past.get(Number(number))).filter(Boolean));
  ["shown", "beside"].forEach((id, i) => {
    at(id).replaceChildren(...["–", ...past.keys()].map((number) => make("option", "", String(number))));
    at(id).value = runs[i] ? String(runs[i].number) : "–";
  });
}

async function run(path, body, beside) {
  const button = at("panel").querySelector("[type=submit]");
  at("state").textContent = "running …";
  button.disabled = true;
  const found = await ask(path, body);
  button.disabled = false;
  at("state").textContent = found.data ? "run " + (last + 1) + " took " + seconds(found.seconds) : "failed";
  if (found.changed) await reload();
  fail(found.error);
  if (!found.data) return;
  past.set(++last, Object.assign(found.data, { number: last, key: found.run, body }));
  if (past.size > 20) past.delete(past.keys().next().value);
  display(...(beside ? [beside, last] : [last, at("beside").value]));
}

function answering(rerun) {  // a form in the details of an answer, which calls rerun with the node, and a text or null
  extras.push((node) => {
    if (!ANSWERS.includes(node.kind) || node.name === null) return [];
    const form = make("form"), label = input("another answer for " + spell(node.name), node.text, 2), again = make("button", "", "Ask again");
    again.type = "button";
    form.append(label, make("button", "", "Go on with this answer"), again);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      rerun(node, label.querySelector("textarea").value);
    });
    again.addEventListener("click", () => rerun(node, null));
    return [form];
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  (event.target.closest("form") || at("panel")).requestSubmit();
});
for (const id of ["shown", "beside"]) at(id).addEventListener("input", () => display(at("shown").value, at("beside").value));
