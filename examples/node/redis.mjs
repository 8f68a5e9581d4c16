import { randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { createClient, RESP_TYPES } from "redis";

const WAIT_S = 10;
const options = { url: "redis://localhost:6379", socket: { connectTimeout: 5000 } };
const sender = await createClient(options).connect();
// A blocking read needs a connection of its own, and replies are bytes.
const reader = (await createClient(options).connect()).withTypeMapping({
  [RESP_TYPES.BLOB_STRING]: Buffer,
});

async function ask(request) {
  const id = randomUUID();
  const record = encode({ id, deadline_ms: Date.now() + WAIT_S * 1000, ...request });
  await sender.xAdd("embedstream.requests", "*", { data: Buffer.from(record) });
  const popped = await reader.blPop(`embedstream.reply.${id}`, WAIT_S);
  if (popped === null) throw new Error("no reply");
  const reply = decode(popped.element);
  if (reply.id !== id || reply.error) throw new Error(reply.error?.code ?? "another's reply");
  return reply;
}

const reply = await ask({ input: ["a text", "another"] });
for (const { index, embedding } of reply.data) {
  // Little-endian float32, copied: the bytes need not be aligned, and Buffer.slice does not copy.
  const vector = new Float32Array(new Uint8Array(embedding).buffer);
  console.log(index, vector.length, vector[0]);
}
sender.destroy();
reader.destroy();
