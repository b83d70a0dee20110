// openai-npm: `node openai.mjs CHECK` runs one check and fails with an exit status.
import assert from "node:assert/strict";
import OpenAI, { AuthenticationError, BadRequestError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.MODEL;
const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const City = z.object({ name: z.string().max(20), country: z.string().max(20), size: z.enum(["small", "large"]) });
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      parameters: {
        type: "object",
        properties: { town: { type: "string", enum: ["Paris", "Rome"] } },
        required: ["town"],
        additionalProperties: false,
      },
    },
  },
];

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0 });
    assert.match(answer.choices[0].message.content, /Paris/);
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, answer.choices[0].message.content);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "One, two,", max_tokens: 8, logprobs: 1 });
    assert.equal(answer.choices[0].logprobs.tokens.length, 8);
  },
  async parse() {
    const asked = [{ role: "user", content: "Paris as JSON." }];
    const answer = await client.chat.completions.parse({
      model, messages: asked, max_tokens: 200, response_format: zodResponseFormat(City, "city"),
    });
    assert.ok(City.safeParse(answer.choices[0].message.parsed).success);
  },
  async tools() {
    const answer = await client.chat.completions.create({ model, messages, tools, max_tokens: 24 });
    assert.ok(["stop", "length", "tool_calls"].includes(answer.choices[0].finish_reason));
  },
  async forced() {
    const answer = await client.chat.completions.create({
      model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200, temperature: 0,
    });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "weather");
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).town));
  },
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    assert.deepEqual(listed, [model]);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), BadRequestError);
    await assert.rejects(new OpenAI({ apiKey: "wrong", maxRetries: 0 }).models.list(), AuthenticationError);
  },
};

await checks[process.argv[2]]();
