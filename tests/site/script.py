"""Run the scripts of docs/figures in Node, without a browser."""

import json
import os
import subprocess

import pytest
from built import ROOT
from frames import DATA
from npm import CACHE, program

FIGURES, MODULES = ROOT / "docs" / "figures", CACHE / "node_modules"
#: JavaScript stubs of browser objects, which Node does not have.
NO_PAGE = """
globalThis.document = { querySelectorAll: () => [], createTreeWalker: () => ({}) };
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.location = { hash: "" };
"""
ASK = """
import {{ readFileSync }} from "node:fs";
import * as model from "./model.js";
import figure from "./{name}.js";
const load = (path) => new model.LanguageModel(Uint8Array.from(readFileSync(path)).buffer);
const plain = (_, x) => {{
  if (typeof x === "number" && !Number.isFinite(x)) return `#${{x}}#`;
  return ArrayBuffer.isView(x) || x instanceof Set ? Array.from(x) : x;
}};
const given = JSON.parse(readFileSync(0));
console.log(JSON.stringify({expression}, plain).replace(/"#(.*?)#"/g, "$1"));
"""


def computed(name: str, expression: str, given, folder):
    """Evaluate JavaScript that may use `given` and `figure`, the exports of NAME.js."""
    try:
        node = program("node")
    except SystemExit:
        pytest.skip("there is no Node here, nor its wheel")
    options = ["--bundle", "--format=esm", "--platform=node", f"--banner:js={NO_PAGE}"]
    for data in DATA:
        if f'"fwlab-{data}"' in (FIGURES / f"{name}.js").read_text("utf-8"):
            path = folder / f"{data}.json"
            path.write_text(json.dumps(DATA[data]()), "utf-8")
            options.append(f"--alias:fwlab-{data}={path}")
    script = subprocess.check_output(
        [*node, MODULES / "esbuild" / "bin" / "esbuild", *options],
        input=ASK.format(name=name, expression=expression),
        cwd=FIGURES,
        env=os.environ | {"NODE_PATH": str(MODULES)},
        text=True,
    )
    bundle = folder / f"{name}.mjs"
    bundle.write_text(script, "utf-8")
    answer = subprocess.check_output(
        [*node, bundle], input=json.dumps(given), text=True
    )
    return json.loads(answer)
