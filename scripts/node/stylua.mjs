// StyLua's command line, as far as this project needs it: the npm package is the library alone.
//
//     node scripts/node/stylua.mjs [--write] FOLDER…
//
// Checks every .lua file under the folders against stylua.toml and shows the first line that differs;
// --write rewrites them. Exit code 1 if a file differs or does not parse, 2 for a wrong call.

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import {
  CallParenType,
  Config,
  IndentType,
  LineEndings,
  LuaVersion,
  OutputVerification,
  QuoteStyle,
  formatCode,
} from "@johnnymorganz/stylua";

const ROOT = join(import.meta.dirname ?? new URL(".", import.meta.url).pathname, "..", "..");
const ENUMS = {
  syntax: LuaVersion,
  line_endings: LineEndings,
  indent_type: IndentType,
  quote_style: QuoteStyle,
  call_parentheses: CallParenType,
};

function readConfig() {
  const config = Config.new();
  for (const line of readFileSync(join(ROOT, "stylua.toml"), "utf8").split("\n")) {
    const match = /^(\w+) = (?:"(\w+)"|(\d+))$/.exec(line.replace(/\s*#.*$/, ""));
    if (!match) {
      if (/^\s*(#|$)/.test(line)) continue;
      throw new Error(`stylua.toml: cannot read the line: ${line}`);
    }
    const [, key, name, number] = match;
    const value = name === undefined ? Number(number) : ENUMS[key]?.[name];
    if (!(key in config) || value === undefined) throw new Error(`stylua.toml: unknown setting: ${line}`);
    config[key] = value;
  }
  return config;
}

function luaFiles(folder) {
  return readdirSync(folder, { recursive: true })
    .filter((name) => name.endsWith(".lua"))
    .sort()
    .map((name) => join(folder, name));
}

const write = process.argv[2] === "--write";
const folders = process.argv.slice(write ? 3 : 2);
if (folders.length === 0) {
  console.error("usage: stylua.mjs [--write] FOLDER…");
  process.exit(2);
}

let checked = 0;
let wrong = 0;
for (const file of folders.flatMap(luaFiles)) {
  const name = relative(process.cwd(), file);
  const before = readFileSync(file, "utf8");
  checked += 1;
  let after;
  try {
    // formatCode consumes its configuration, so each file gets its own
    after = formatCode(before, readConfig(), undefined, OutputVerification.Full);
  } catch (error) {
    console.error(`${name}: ${error.message ?? error}`);
    wrong += 1;
    continue;
  }
  if (after === before) continue;
  if (write) {
    writeFileSync(file, after);
    console.log(`${name}: rewritten`);
    continue;
  }
  const [old, now] = [before.split("\n"), after.split("\n")];
  const at = now.findIndex((line, index) => line !== old[index]);
  const line = at === -1 ? now.length : at;
  console.error(`${name}:${line + 1}: format differs (make format rewrites it)`);
  console.error(`  - ${old[line] ?? ""}\n  + ${now[line] ?? ""}`);
  wrong += 1;
}
if (checked === 0) {
  console.error(`no .lua file under ${folders.join(", ")}`);
  process.exit(2);
}
if (!write) console.log(`StyLua: ${checked - wrong} of ${checked} files as they should be`);
process.exit(wrong === 0 ? 0 : 1);
