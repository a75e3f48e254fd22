// Starts web_worker.mjs in Node: node node_worker.mjs URL FOLDER, where FOLDER has node_modules/onnxruntime-web.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { obey } from "./web_worker.mjs";

const [url, folder] = process.argv.slice(2);
const found = createRequire(`${folder}/package.json`).resolve("onnxruntime-web");
const ort = await import(pathToFileURL(found.replace(/\.js$/, ".mjs")));
try {
  await obey(ort, url);
} catch {
  // whoever gave the commands has ended
}
