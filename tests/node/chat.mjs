// Asks for one streamed chat with the official client and prints what came of it as JSON:
// node chat.mjs BASE_URL MODEL, from a folder in which the client is installed.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [base, model] = process.argv.slice(2);
const found = createRequire(`${process.cwd()}/`).resolve("openai");
const {default: OpenAI} = await import(pathToFileURL(found).href);
const client = new OpenAI({baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0});
const messages = [{role: "user", content: "say something"}];
const said = {model, messages, max_tokens: 8, temperature: 0, seed: 1};

async function outcome(work) {
  try {
    return {text: await work()};
  } catch (error) {
    return {error: error.message, status: error.status ?? null, kind: error.constructor.name};
  }
}

const streamed = await outcome(async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({...said, stream: true})) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  return text;
});
const whole = await outcome(async () => {
  const answer = await client.chat.completions.create(said);
  return answer.choices[0].message.content;
});
const models = await outcome(async () => (await client.models.list()).data.map(({id}) => id).join(" "));
const one = await outcome(async () => (await client.models.retrieve(model)).id);
console.log(JSON.stringify({streamed, whole, models, one}));
