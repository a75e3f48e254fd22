// Obeys scripts/portability.py with onnxruntime-web, in Node or in a page: opens models and runs them.
// The messages are those of messages.py.

const ARRAYS = { float32: Float32Array, float16: Uint16Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array,
  bool: Uint8Array, float64: Float64Array };

function packed(header, tensors) {
  const listed = tensors.map(({ name, dtype, dims }) => ({ name, dtype, dims }));
  const text = new TextEncoder().encode(JSON.stringify({ ...header, tensors: listed }));
  const message = new Uint8Array(4 + text.length + tensors.reduce((sum, tensor) => sum + tensor.bytes.length, 0));
  new DataView(message.buffer).setUint32(0, text.length, true);
  message.set(text, 4);
  let start = 4 + text.length;
  for (const { bytes } of tensors) {
    message.set(bytes, start);
    start += bytes.length;
  }
  return message;
}

function unpacked(message) {
  const length = new DataView(message).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(message, 4, length)));
  let start = 4 + length;
  const arrays = {};
  for (const { name, dtype, dims } of header.tensors) {
    const size = dims.reduce((product, dim) => product * dim, 1) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    arrays[name] = { dtype, dims, data: new ARRAYS[dtype](message.slice(start, start + size)) };
    start += size;
  }
  return { header, arrays };
}

function halves(ort, dtype, data) {
  // newer engines have an array type of their own for float16, and onnxruntime-web asks for it there
  return dtype === "float16" && globalThis.Float16Array ? new Float16Array(data.buffer) : data;
}

export async function obey(ort, url) {
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  const sessions = new Map();
  const verbs = {
    async open({ number }, { model }) {
      sessions.set(number, await ort.InferenceSession.create(model.data, { executionProviders: ["wasm"] }));
      return [];
    },
    async run({ number }, arrays) {
      const feeds = {};
      for (const [name, { dtype, dims, data }] of Object.entries(arrays)) {
        feeds[name] = new ort.Tensor(dtype, halves(ort, dtype, data), dims);
      }
      const results = await sessions.get(number).run(feeds);
      return Object.entries(results).map(([name, { type, dims, data }]) => {
        const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
        return { name, dtype: type, dims, bytes };
      });
    },
    async reset() {
      for (const session of sessions.values()) await session.release();
      sessions.clear();
      return [];
    },
  };
  for (;;) {
    const message = await (await fetch(`${url}/command`)).arrayBuffer();
    if (!message.byteLength) return;
    const { header, arrays } = unpacked(message);
    let answer;
    try {
      answer = packed({}, await verbs[header.verb](header, arrays));
    } catch (error) {
      answer = packed({ error: String(error.message ?? error), trace: String(error.stack ?? "") }, []);
    }
    await fetch(`${url}/answer`, { method: "POST", body: answer });
  }
}
