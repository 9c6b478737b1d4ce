// Asks a server by the packages of Node that know its protocols, and prints what each was told as a line of JSON.
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");
const { Ollama } = require("ollama");
const { generateText, streamText, generateObject, jsonSchema } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Count to three." }];
const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"], additionalProperties: false };
const tell = (name, told) => console.log(JSON.stringify([name, told]));

async function main() {
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const asked = { model, messages, max_tokens: 6, temperature: 0 };
  tell("openai", (await openai.chat.completions.create(asked)).choices[0].message.content);
  let text = "";
  for await (const chunk of await openai.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  tell("openai, streamed", text);
  const response = await openai.responses.create({ model, input: messages, max_output_tokens: 6, temperature: 0 });
  tell("openai, responses", response.output_text);
  const refused = await openai.chat.completions.create({ ...asked, temperature: -1 }).catch((error) => error);
  tell("openai, refused", [refused instanceof OpenAI.BadRequestError, refused.param]);

  const anthropic = new Anthropic({ baseURL: url, apiKey: "none" });
  tell("anthropic", (await anthropic.messages.create(asked)).content[0].text);
  tell("anthropic, streamed", await anthropic.messages.stream(asked).finalText());

  const ollama = new Ollama({ host: url });
  const options = { num_predict: 6, temperature: 0 };
  tell("ollama", (await ollama.chat({ model, messages, options })).message.content);
  text = "";
  for await (const part of await ollama.chat({ model, messages, options, stream: true })) text += part.message.content;
  tell("ollama, streamed", text);

  const provider = createOpenAICompatible({
    name: "server", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
  });
  const call = { model: provider(model), messages, maxOutputTokens: 6, temperature: 0 };
  tell("ai", (await generateText(call)).text);
  const streamed = streamText(call);
  tell("ai, streamed", await streamed.text);
  tell("ai, usage", (await streamed.usage).outputTokens);
  const object = await generateObject({ ...call, maxOutputTokens: 40, schema: jsonSchema(schema) });
  tell("ai, object", Number.isInteger(object.object.age));
}

main();
