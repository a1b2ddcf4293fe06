#!/usr/bin/env bash
# Guess: a gateway whose client hangs up closes its own request to the provider, as proxies do, so that the
# provider stops; one that streams does so at the next event that it can't deliver.
# Seen (Portkey's gateway 1.15.2 from npm, over @hono/node-server 1.13.8 and Node 20): the provider's connection
# stays open for as long as the provider answers, streamed or not, also while a new event comes each 0.1 s that
# nobody reads: it writes an answer of 8 s to its end. Over @hono/node-server 1.19.19, which npm takes for it, a
# stream is answered 500 and its request to the provider is made all the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
# install VERSION: the gateway over that version of @hono/node-server
install() {
    rm -rf node_modules package-lock.json
    printf '{"private": true, "overrides": {"@hono/node-server": "%s"}}' "$1" >package.json
    npm install --silent --no-audit --no-fund @portkey-ai/gateway@1.15.2
}
cat >try.mjs <<'JS'
import { spawn } from 'node:child_process';
import http from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';

const EVENTS = 80, EACH_MS = 100, HANGS_UP_MS = 1000;
const seen = [];
const provider = http.createServer(async (request, response) => {
  let body = '';
  for await (const part of request) body += part;
  const mine = { written: 0, whole: false, closed: false };
  seen.push(mine);
  response.on('close', () => { mine.closed = true; });
  const stream = JSON.parse(body).stream;
  response.writeHead(200, { 'content-type': stream ? 'text/event-stream' : 'application/json' });
  const event = 'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m",' +
    '"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n';
  for (let n = 0; n < EVENTS && !mine.closed; n++) {
    if (stream) response.write(event);
    mine.written++;
    await sleep(EACH_MS);
  }
  mine.whole = !mine.closed;
  response.end(stream ? 'data: [DONE]\n\n' : '{"id":"x","object":"chat.completion","created":1,"model":"m","choices":' +
    '[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}');
});
const listening = server => new Promise(done => server.listen(0, '127.0.0.1', () => done(server.address().port)));
const to = await listening(provider);
const free = http.createServer();
const port = await listening(free);
await new Promise(done => free.close(done));
const gateway = spawn('node', ['node_modules/@portkey-ai/gateway/build/start-server.js', `--port=${port}`, '--headless'],
  { stdio: 'ignore', env: { ...process.env, TRUSTED_CUSTOM_HOSTS: '127.0.0.1' } });
const ask = (stream, signal) => fetch(`http://127.0.0.1:${port}/v1/chat/completions`, {
  method: 'POST', signal,
  headers: { 'content-type': 'application/json', authorization: 'Bearer x', 'x-portkey-provider': 'openai',
    'x-portkey-custom-host': `http://127.0.0.1:${to}/v1` },
  body: JSON.stringify({ model: 'm', stream, messages: [{ role: 'user', content: 'a' }] }),
});
try {
  for (let n = 0; n < 100; n++) {
    try { await fetch(`http://127.0.0.1:${port}`); break; } catch { await sleep(200); }
  }
  const found = {};
  if (process.argv[2] === 'status') {
    found.stream = (await ask(true, AbortSignal.timeout(20000))).status;
    found.asked = seen.length;
  } else {
    for (const stream of [true, false]) {
      const asking = ask(stream, AbortSignal.timeout(HANGS_UP_MS)).then(answer => answer.text()).catch(() => 'hung up');
      const ended = await asking;
      await sleep(EVENTS * EACH_MS + 2000);
      const { written, whole } = seen.at(-1);
      found[stream ? 'streamed' : 'plain'] = `${ended}; written ${written} of ${EVENTS}, ${whole ? 'whole' : 'cut'}`;
    }
  }
  console.log(JSON.stringify(found));
} finally {
  gateway.kill('SIGKILL');
  provider.closeAllConnections();
  provider.close();
}
JS
install 1.13.8
seen=$(node try.mjs)
echo "$seen"
[ "$seen" = '{"streamed":"hung up; written 80 of 80, whole","plain":"hung up; written 80 of 80, whole"}' ]
install 1.19.19
seen=$(node try.mjs status)
echo "$seen"
[ "$seen" = '{"stream":500,"asked":1}' ]
echo "as seen: a hang-up stops nothing, and a stream over the newest server is a 500"
