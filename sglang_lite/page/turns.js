
// --------------------------------------------------------------------------------------- turns of a served model

function chooser(name, options, value) {
  const select = make("select");
  select.append(...Object.entries(options).map(([each, text]) => Object.assign(make("option", "", text), { value: each })));
  select.value = value;
  select.setAttribute("aria-label", name);
  return select;
}

function entry(name, value) {
  const field = make("input");
  field.value = value;
  field.size = 6;
  return [make("label", "", name + " ", field), field];
}

function turn(role, kind, text) {  // editor of a turn, whose read() is what the server plays
  const part = make("fieldset", "turn"), number = at("fields").children.length + 1;
  const roles = chooser("role", { "": "no role", system: "system", user: "user", assistant: "assistant" }, role);
  const kinds = chooser("content", { text: "text", gen: "generation", select: "choice" }, kind);
  const held = chooser("constraint", { "": "free", json_schema: "JSON schema", regex: "regex", ebnf: "grammar" }, "");
  const label = input("text", text, 1), area = label.querySelector("textarea"), report = checked(label, () => held.value);
  const [named, name] = entry("variable", "answer" + (number > 2 ? number : "")), [tokens, most] = entry("max tokens", "64");
  const [heat, temperature] = entry("temperature", "0"), away = make("button", "", "Remove");
  away.type = "button";
  away.addEventListener("click", () => part.remove());
  const arrange = () => {
    const gen = kinds.value === "gen", free = gen && !held.value;
    for (const each of [held, tokens, heat]) each.hidden = !gen;
    named.hidden = kinds.value === "text";
    report.hidden = free;
    report.querySelector(".report").hidden = !gen;
    label.firstChild.data = gen ? "constraint" : kinds.value === "select" ? "choices, one a line" : "text";
    if (gen && held.value) area.dispatchEvent(new Event("input"));
  };
  for (const each of [kinds, held]) each.addEventListener("input", arrange);
  part.append(make("legend", "", "turn " + number), roles, kinds, named, tokens, heat, held, away, report);
  part.read = () => ({
    role: roles.value, kind: kinds.value, name: kinds.value === "text" ? null : name.value,
    text: kinds.value === "gen" ? "" : area.value, max_tokens: Number(most.value), temperature: Number(temperature.value),
    constraint: kinds.value === "gen" && held.value ? { kind: held.value, text: area.value } : null,
  });
  arrange();
  return part;
}

answering((node, value) => {  // the answers before it stay, those after it are asked for again
  const answers = node.run.nodes.filter((each) => ANSWERS.includes(each.kind)), place = answers.indexOf(node);
  let seen = 0;
  const turns = node.run.body.turns.map((each) => {
    if (each.kind === "text") return each;
    const here = seen++;
    return { ...each, answer: here < place ? answers[here].text : here === place ? value : null };
  });
  run("run", { ...node.run.body, turns }, node.run.number);
});
at("panel").addEventListener("submit", (event) => {
  event.preventDefault();
  const seed = at("seed").value.trim();
  run("run", { turns: [...at("fields").children].map((part) => part.read()), seed: seed ? Number(seed) : null });
});
at("more").addEventListener("click", () => at("fields").append(turn("user", "text", "")));
at("fields").append(turn("user", "text", "What is the capital of France?"));
at("fields").append(turn("assistant", "gen", ""));
