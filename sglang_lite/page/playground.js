
// -------------------------------------------------------------------------------------------- programs of a file

let described = { programs: [], texts: [] }, inputs = [];

function fields() {  // of the chosen program: its arguments, and its texts with those outside of all programs
  const program = described.programs.find((each) => each.name === at("program").value);
  if (!program) return;
  inputs = [];
  const shown = program.parameters.map((each) => {
    const label = input("argument " + each.name, each.text, 1);
    inputs.push({ argument: each.name, area: label.querySelector("textarea") });
    return label;
  });
  described.texts.forEach((each, place) => {
    if (each.program !== program.name && each.program !== "") return;
    const label = input(KIND_NAMES[each.kind] + ", line " + each.line, each.text, 1), area = label.querySelector("textarea");
    inputs.push({ place, area, text: each.text });
    area.addEventListener("input", () => label.classList.toggle("changed", area.value !== each.text));
    shown.push(each.kind === "prompt" ? label : checked(label, () => each.kind));
  });
  at("fields").replaceChildren(...shown);
}

reload = async () => {
  const found = await ask("programs", {}), before = at("program").value;
  fail(found.error);
  if (found.error) return;
  described = found;
  at("program").replaceChildren(...found.programs.map((each) => make("option", "", each.name)));
  if (found.programs.some((each) => each.name === before)) at("program").value = before;
  fields();
};

answering((node, value) => run("rerun", { run: node.run.key, at: node.name, value }, node.run.number));
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
at("program").addEventListener("input", fields);
reload();
