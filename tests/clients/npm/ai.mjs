// Vercel AI SDK: `node ai.mjs CHECK` runs one check and fails with an exit status.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const penstock = createOpenAICompatible({
  name: "penstock",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const model = penstock(process.env.MODEL);
const City = z.object({ name: z.string().max(20), country: z.string().max(20), size: z.enum(["small", "large"]) });
const asked = { model, prompt: "What is the capital of France?", maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
const weather = tool({
  description: "Tell the weather in a town.",
  inputSchema: z.object({ town: z.enum(["Paris", "Rome"]) }),
  execute: async ({ town }) => `It is sunny in ${town}.`,
});

const checks = {
  async text() {
    const { text, usage } = await generateText(asked);
    assert.match(text, /Paris/);
    assert.ok(usage.outputTokens > 0);
    let streamed = "";
    for await (const piece of streamText(asked).textStream) streamed += piece;
    assert.equal(streamed, text);
  },
  async object() {
    const form = { ...asked, prompt: "Paris as JSON.", schema: City, maxOutputTokens: 200 };
    assert.ok(City.safeParse((await generateObject(form)).object).success);
    const streamed = streamObject(form);
    let pieces = 0;
    for await (const _ of streamed.partialObjectStream) pieces += 1;
    assert.ok(pieces > 1 && City.safeParse(await streamed.object).success);
  },
  async tools() {
    const { text, toolCalls } = await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(3) });
    assert.ok(text || toolCalls.length);
  },
  async forced() {
    const { toolCalls } = await generateText({ ...asked, maxOutputTokens: 200, tools: { weather }, toolChoice: "required" });
    assert.equal(toolCalls[0].toolName, "weather");
    assert.ok(["Paris", "Rome"].includes(toolCalls[0].input.town));
  },
};

await checks[process.argv[2]]();
