// Generate greedily with llama.cpp. Usage: node evaluate.mjs PACKAGES JOBS.json
// Each job names a model, prompts as token ids, how many tokens to generate, adapters to apply, and
// a file: for every prompt and token, the id and the probabilities of the whole vocabulary, float32.
import {readFileSync, writeFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [packages, jobs] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${packages}/node_modules/node-llama-cpp/dist/index.js`));
let said = "";
const llama = await getLlama({
    gpu: false, build: "never", progressLogs: false, logLevel: "error",
    logger: (level, message) => { said += message; },
});

async function evaluate({model: modelPath, adapters, prompts, tokens: count, vocabulary, file}) {
    const model = await llama.loadModel({modelPath, gpuLayers: 0});
    const context = await model.createContext({
        contextSize: 256, sequences: 1, threads: 1, flashAttention: false,
        experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
        lora: {adapters: adapters.map((filePath) => ({filePath}))},
    });
    const found = new Float32Array(prompts.length * count * (1 + vocabulary));
    const sequence = context.getSequence();
    for (const [index, prompt] of prompts.entries()) {
        await sequence.clearHistory();
        let at = index * count * (1 + vocabulary);
        let left = count;
        const output = sequence.evaluateWithMetadata(
            prompt, {probabilities: true}, {temperature: 0, yieldEogToken: true});
        for await (const {token, probabilities} of output) {
            found[at] = token;
            for (const [id, probability] of probabilities) found[at + 1 + id] = probability;
            at += 1 + vocabulary;
            left -= 1;
            if (left == 0) break;
        }
    }
    writeFileSync(file, found);
    await context.dispose();
    await model.dispose();
}

for (const job of JSON.parse(readFileSync(jobs, "utf8"))) {
    said = "";
    try {
        await evaluate(job);
        console.log(JSON.stringify({file: job.file}));
    } catch (error) {
        console.log(JSON.stringify({file: job.file, error: `${error}: ${said}`}));
    }
}
process.exit(0);
