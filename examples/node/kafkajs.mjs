import { randomUUID } from "node:crypto";
import { Kafka, CompressionTypes, logLevel } from "kafkajs";

const WAIT_MS = 60_000;
const me = `${randomUUID()}.`; // ids that nobody else has
const kafka = new Kafka({ clientId: "web", brokers: ["localhost:9092"], logLevel: logLevel.ERROR });
const consumer = kafka.consumer({ groupId: me });
const producer = kafka.producer();
const texts = new Map();
for (let i = 0; i < 100; i++) texts.set(`${me}${i}`, `text ${i}`);

await consumer.connect();
await consumer.subscribe({ topic: "embedstream.replies", fromBeginning: false });
const joined = new Promise((resolve) => consumer.on(consumer.events.GROUP_JOIN, resolve));
let answered;
const done = new Promise((resolve, reject) => {
  answered = resolve;
  setTimeout(() => reject(new Error("no reply")), WAIT_MS).unref();
});
await consumer.run({
  eachMessage: async ({ message }) => {
    const reply = JSON.parse(message.value.toString());
    const text = texts.get(reply.id);
    if (text === undefined) return; // somebody else's, or seen before
    if (reply.error) throw new Error(`${reply.error.code} for ${text}`);
    texts.delete(reply.id);
    console.log(text, reply.data[0].embedding.length);
    if (texts.size === 0) answered();
  },
});
await joined;

await producer.connect();
await producer.send({
  topic: "embedstream.requests",
  compression: CompressionTypes.GZIP,
  messages: [...texts].map(([id, text]) => ({
    key: id,
    value: JSON.stringify({ id, input: [text] }),
    headers: { "content-type": "application/json" },
  })),
});
await done;
await consumer.disconnect();
await producer.disconnect();
