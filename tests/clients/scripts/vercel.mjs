// Vercel's `ai`: openai(model), which calls /v1/responses, openai.chat(model), and embeddings.
//   node vercel.mjs BASE_URL
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateText, streamText } from "ai";

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: "unused" });
const found = {};
const asked = { prompt: "hi", maxOutputTokens: 16, maxRetries: 0 };
for (const [name, model] of [["openai(model)", openai("tiny")], ["openai.chat(model)", openai.chat("tiny")]]) {
  const whole = await generateText({ model, ...asked });
  found[`generateText, ${name}`] = whole.text ? "works" : "no text";
  let text = "";
  for await (const part of streamText({ model, ...asked }).textStream) text += part;
  found[`streamText, ${name}`] = text === whole.text ? "works" : "another text";
}
const { embeddings } = await embedMany({ model: openai.embedding("tiny"), values: ["a", "b"], maxRetries: 0 });
found["embedMany"] = embeddings.length === 2 ? "works" : "no vectors";
console.log(JSON.stringify(found));
