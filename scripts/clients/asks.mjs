// One request of a client from npm: node asks.mjs CLIENT CHECK URL MODEL, in a folder that has it.
// Exit code 0: the client has parsed what was asked for.
import { z } from "zod";

const [name, check, url, model] = process.argv.slice(2);
const KEY = "none";
const SAID = "Name the capital of France in one sentence.";
const ASKED = "What is the weather in Paris?";
const TOLD = "Ada Lovelace is 36 years old.";
const FEW = 40;
const CITY = z.object({ city: z.string() });
const PERSON = z.object({ name: z.string(), age: z.number().int() });
const ABOUT = "Get the weather in a city.";

async function list(stream, read) {
  const pieces = [];
  for await (const part of stream) pieces.push(read(part));
  return pieces;
}

const CLIENTS = {
  async openai() {
    const { default: OpenAI } = await import("openai");
    const { zodFunction, zodResponseFormat } = await import("openai/helpers/zod");
    const { completions } = new OpenAI({ baseURL: url, apiKey: KEY, maxRetries: 0 }).chat;
    const ask = (content, more) =>
      completions.create({ model, messages: [{ role: "user", content }], ...more });
    return {
      chat: async () => (await ask(SAID, { max_tokens: FEW })).choices[0].message.content,
      stream: async () => {
        const settings = { stream: true, stream_options: { include_usage: true }, max_tokens: FEW };
        return list(await ask(SAID, settings), (part) => part.choices[0]?.delta.content);
      },
      tools: async () => {
        const tool = zodFunction({ name: "get_weather", description: ABOUT, parameters: CITY });
        const answer = await ask(ASKED, { tools: [tool], tool_choice: "required" });
        return JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
      },
      schema: async () => {
        const messages = [{ role: "user", content: TOLD }];
        const response_format = zodResponseFormat(PERSON, "person");
        return (await completions.parse({ model, messages, response_format })).choices[0].message.parsed;
      },
      logprobs: async () =>
        (await ask(SAID, { logprobs: true, top_logprobs: 2, max_tokens: FEW })).choices[0].logprobs
          .content.map((token) => token.logprob),
    };
  },

  async ai() {
    const ai = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const settings = { name: "served", baseURL: url, apiKey: KEY, supportsStructuredOutputs: true };
    const served = { model: createOpenAICompatible(settings)(model), maxRetries: 0 };
    return {
      chat: async () =>
        (await ai.generateText({ ...served, prompt: SAID, maxOutputTokens: FEW })).text,
      stream: async () =>
        list(ai.streamText({ ...served, prompt: SAID, maxOutputTokens: FEW }).textStream, (part) => part),
      tools: async () => {
        const tools = { get_weather: ai.tool({ description: ABOUT, inputSchema: CITY }) };
        const given = { ...served, prompt: ASKED, tools, toolChoice: "required" };
        return (await ai.generateText(given)).toolCalls[0].input;
      },
      schema: async () => {
        const output = ai.Output.object({ schema: PERSON });
        return (await ai.generateText({ ...served, prompt: TOLD, output })).output;
      },
    };
  },

  async "@langchain/openai"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    const { tool } = await import("@langchain/core/tools");
    const chat = (more) =>
      new ChatOpenAI({ model, apiKey: KEY, configuration: { baseURL: url }, maxRetries: 0, ...more });
    const few = { maxTokens: FEW };
    return {
      chat: async () => (await chat(few).invoke(SAID)).text,
      stream: async () => list(await chat(few).stream(SAID), (part) => part.text),
      tools: async () => {
        const about = { name: "get_weather", description: ABOUT, schema: CITY };
        const weather = tool(() => "sunny", about);
        const answer = await chat().bindTools([weather], { tool_choice: "any" }).invoke(ASKED);
        return answer.tool_calls[0].args;
      },
      schema: async () => chat().withStructuredOutput(PERSON).invoke(TOLD),
      logprobs: async () =>
        (await chat({ ...few, logprobs: true, topLogprobs: 2 }).invoke(SAID)).response_metadata.logprobs
          .content.map((token) => token.logprob),
    };
  },
};

const GOOD = {
  chat: (got) => got.trim().length > 0,
  stream: (got) => got.filter(Boolean).length > 1,
  tools: (got) => typeof CITY.parse(got).city === "string",
  schema: (got) => PERSON.parse(got).name !== null,
  logprobs: (got) => got.length > 0 && got.every((value) => value <= 0),
};

const ask = (await CLIENTS[name]())[check];
if (ask === undefined) {
  console.log("-");
} else {
  const got = await ask();
  if (!GOOD[check](got)) throw new Error(`${check}: got ${JSON.stringify(got)}`);
  console.log(JSON.stringify(got).slice(0, 100));
}
