// ONNX Runtime's half of the comparison: its LinearAttention on the CPU. Told what to do line by line, as
// onnx_operator.cpp is and with the same commands:
//
//   prepare <form> <rule> <D> <H> <N> <threads> <folder>   reads the inputs and the model <rule>_<H>.onnx there
//   outputs                                                leaves output.f32 and present_state.f32 in the folder
//   time <seconds>                                         calls for that long, a turn
//   finish                                                 answers each turn's median of seconds
//   version                                                answers the version
//
// Seconds are the operator's own, as ONNX Runtime's profiler has them, in whole microseconds: this package's calls copy
// every output into a new array (as long again as the operator takes for one token), which other languages need not.
// Decode steps write the state of one tensor into another in turn.
import { readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import ort from 'onnxruntime-node';

const floats = (file) => {
  const bytes = readFileSync(file);
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
};
const tensor = (data, shape) => new ort.Tensor('float32', data, shape);

let current;

async function prepare([form, rule, dText, hText, nText, threads, folder]) {
  const [d, h, n] = [dText, hText, nText].map(Number);
  const tokens = form === 'decode' ? 1 : n;
  const session = await ort.InferenceSession.create(`${folder}/${rule.replace('_per_feature', '')}_${h}.onnx`, {
    executionProviders: ['cpu'],
    intraOpNumThreads: Number(threads),
    interOpNumThreads: 1,
    enableProfiling: true, // written when the session is released
    profileFilePrefix: `${folder}/profile`,
  });
  const names = session.inputNames.filter((name) => name !== 'past_state');
  const inputs = names.map((name) => [name, floats(`${folder}/${name}.f32`)]);
  const feeds = []; // of one call each
  for (let t = 0; t < n; t += tokens) {
    const part = ([name, all]) => {
      const columns = all.length / n;
      return [name, tensor(all.subarray(t * columns, (t + tokens) * columns), [1, tokens, columns])];
    };
    feeds.push(Object.fromEntries(inputs.map(part)));
  }
  const state = () => tensor(new Float32Array(h * d * d), [1, h, d, d]);
  current = {
    session, feeds, folder, decodes: form === 'decode', calls: 0, turns: [],
    output: tensor(new Float32Array(tokens * h * d), [1, tokens, h * d]),
    states: [state(), state()], // the one that is read, the one that is written
  };
  return 'ready';
}

async function call(c) {
  const inputs = { ...c.feeds[c.calls % c.feeds.length], past_state: c.states[0] };
  await c.session.run(inputs, { output: c.output, present_state: c.states[1] });
  c.calls += 1;
  if (c.decodes) c.states.reverse();
}

async function outputs(c) {
  const rows = [];
  for (let i = 0; i < c.feeds.length; ++i) {
    await call(c);
    rows.push(Buffer.from(c.output.data.slice().buffer));
  }
  writeFileSync(`${c.folder}/output.f32`, Buffer.concat(rows));
  writeFileSync(`${c.folder}/present_state.f32`, c.states[c.decodes ? 0 : 1].data);
  return 'written';
}

async function time(c, limit) {
  const first = c.calls, end = performance.now() + 1e3 * limit;
  do await call(c); while (performance.now() < end);
  c.turns.push([first, c.calls]);
  return 'called';
}

async function finish(c) {
  await c.session.release();
  const file = `${c.folder}/${readdirSync(c.folder).find((name) => name.startsWith('profile'))}`;
  const kernels = JSON.parse(readFileSync(file)).filter((event) => event.name.endsWith('kernel_time'));
  rmSync(file);
  if (kernels.length !== c.calls) throw new Error(`${kernels.length} profiles of ${c.calls} calls`);
  kernels.sort((a, b) => a.ts - b.ts);
  const median = ([first, end]) => {
    const taken = kernels.slice(first, end).map((event) => event.dur).sort((a, b) => a - b);
    return taken[taken.length >> 1] / 1e6;
  };
  return c.turns.map(median).join(' ');
}

async function answer(line) {
  const [verb, ...words] = line.split(' ');
  if (verb === 'prepare') return prepare(words);
  if (verb === 'outputs') return outputs(current);
  if (verb === 'time') return time(current, Number(words[0]));
  if (verb === 'finish') return finish(current);
  if (verb === 'version') return ort.env.versions.node;
  return `error: no command '${verb}'`;
}

for await (const line of createInterface({ input: process.stdin })) {
  let reply;
  try {
    reply = await answer(line);
  } catch (e) {
    reply = `error: ${e.message}`;
  }
  console.log(String(reply).replaceAll('\n', ' '));
}
