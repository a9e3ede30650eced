// Sets formulas for docs/hooks/formulas.py. In: KaTeX's path; from standard input a
// list of TeX and whether it is displayed. Out: a list of HTML, or of what is wrong.
const katex = require(process.argv[2]);
const formulas = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const set = ([tex, displayMode]) => {
  try {
    return { html: katex.renderToString(tex, { displayMode, strict: "error" }) };
  } catch ({ message }) {
    return { error: message };
  }
};
process.stdout.write(JSON.stringify(formulas.map(set)));
