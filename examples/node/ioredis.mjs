import { randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Redis } from "ioredis";

const WAIT_S = 10;
const options = { connectTimeout: 5000, maxRetriesPerRequest: 3 };
const sender = new Redis("redis://localhost:6379", options);
const reader = new Redis("redis://localhost:6379", options); // blocking reads: its own connection

async function ask(request) {
  const id = randomUUID();
  const record = encode({ id, deadline_ms: Date.now() + WAIT_S * 1000, ...request });
  await sender.xadd("embedstream.requests", "*", "data", Buffer.from(record));
  const popped = await reader.blpopBuffer(`embedstream.reply.${id}`, WAIT_S);
  if (popped === null) throw new Error("no reply");
  const reply = decode(popped[1]);
  if (reply.id !== id || reply.error) throw new Error(reply.error?.code ?? "another's reply");
  return reply;
}

const documents = ["first document", "second document"];
const reply = await ask({ query: "which one?", documents });
for (const { index, relevance_score } of reply.results) {
  console.log(index, documents[index], relevance_score);
}
sender.disconnect();
reader.disconnect();
