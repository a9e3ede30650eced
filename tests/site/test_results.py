"""The plots of the results say what docs/results/*.json says."""

import copy
import gzip
import json
import re
import sys
from collections import defaultdict
from html import unescape
from itertools import pairwise
from statistics import mean, median

import pytest
from built import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import kernels
import plots

RESULTS = ROOT / "docs" / "results"
PAGE = "results.html"
NAMES = (
    "losses",
    "curves",
    "operations",
    "lengths",
    "batches",
    "decoding",
    "generation",
)


def bench() -> dict:
    return json.loads((RESULTS / "bench-cpu.json").read_text("utf-8"))


def sizes() -> dict:
    return json.loads((RESULTS / "lengths-cpu.json").read_text("utf-8"))


def runs() -> list[dict]:
    """The training runs, the usual seed of each mixer first."""
    paths = RESULTS.glob("nanogpt-cpu-*.json")
    paths = sorted(paths, key=lambda path: (len(path.stem), path.stem))
    return [json.loads(path.read_text("utf-8")) for path in paths]


def speeds() -> dict:
    return json.loads((RESULTS / "generation-cpu.json").read_text("utf-8"))


def results() -> tuple[list[dict], dict, dict, dict]:
    return runs(), bench(), sizes(), speeds()


def draw(name: str, runs: list[dict], bench: dict, sizes: dict, speeds: dict) -> str:
    arguments = {"losses": (runs, {"softmax": 1.88}), "curves": (runs,)}
    arguments |= dict.fromkeys(("lengths", "batches"), (sizes,))
    arguments["generation"] = (speeds,)
    return getattr(plots, name)(*arguments.get(name, (bench,)))


@pytest.fixture(scope="module")
def html(site) -> str:
    return (site / PAGE).read_text("utf-8")


@pytest.fixture(scope="module")
def labels(html) -> dict[str, str]:
    """What each plot of the page says to those who do not see it."""
    return dict(
        re.findall(r'<svg id="plot-(\w+)" role="img" aria-label="([^"]*)"', html)
    )


def test_page_has_every_plot_once_above_its_table(html, labels):
    assert tuple(labels) == NAMES
    for name in NAMES:
        after = html[html.index(f'id="plot-{name}-figure') :]
        after = after[after.index("</svg>") :]
        table, heading = after.find("<table"), after.find("<h2")
        assert table > 0 and (heading < 0 or table < heading)
    assert "<!-- plot:" not in html


def test_names_are_unique_and_the_ink_is_that_of_the_text(html):
    drawings = re.findall(r'<svg id="plot-\w+" role="img".*?</svg>', html, re.DOTALL)
    assert len(drawings) == len(NAMES)
    for drawing in drawings:
        assert len(gzip.compress(drawing.encode())) < 15_000  # as it is sent
        assert "#707685" not in drawing.lower() and "currentColor" in drawing
    together = "".join(drawings)
    ids = re.findall(r'\sid="([^"]+)"', together)
    assert len(ids) == len(set(ids))
    # What is referred to is there.
    targets = re.findall(r'(?:href="|url\()#([^")]+)', together)
    assert targets and set(targets) <= set(ids)


def runs_of(mixer: str) -> list[dict]:
    return [run for run in runs() if run["config"]["mixer"] == mixer]


def final() -> dict[str, list[float]]:
    """The losses of each mixer's runs."""
    losses = defaultdict(list)
    for run in runs():
        losses[run["config"]["mixer"]].append(run["validation_loss"])
    return losses


def test_losses_agree_with_the_results(labels):
    losses = final()
    means = {mixer: mean(seeds) for mixer, seeds in losses.items()}
    rest = labels["losses"].partition(": ")[2]
    ours, _, theirs = rest.partition("; published for ")
    said = re.findall(r"([\w-]+) (\d\.\d+)(?: \(mean of (\d) seeds\))?", ours)
    assert [(m, float(x), int(n or 1)) for m, x, n in said] == [
        (m, round(means[m], 3), len(losses[m])) for m in sorted(means, key=means.get)
    ]
    assert theirs == "softmax: 1.88."


def test_curves_agree_with_the_results(labels):
    first: dict[str, dict] = {}
    for run in runs():
        first.setdefault(run["config"]["mixer"], run)
    label = labels["curves"]
    assert f"{len(first)} mixers" in label
    for place in (0, -1):
        at = {mixer: run["curve"][place][2] for mixer, run in first.items()}
        low, high = min(at, key=at.get), max(at, key=at.get)
        assert f"from {at[low]:.3f} ({low}) to {at[high]:.3f} ({high})" in label


def test_ratios_agree_with_the_results(labels):
    rows = bench()["rows"]
    said = re.findall(
        r"([\w-]+), T ([\d,]+): time ([\d.]+\d)(?:, memory ([\d.]+\d))?",
        labels["operations"],
    )
    assert {case for case, *_ in said} == {row["case"] for row in rows}
    assert len(said) == len({case for case, *_ in said})
    for case, length, time, memory in said:
        mine = [row for row in rows if row["case"] == case]
        longest = max(row["shape"]["T"] for row in mine)
        assert int(length.replace(",", "")) == longest
        sides = {r["side"]: r for r in mine if r["shape"]["T"] == longest}
        ours = sides.pop("efficient")
        # The loop that the kernels are held against, not a variant of it.
        naive = sides.get("naive") or sides.get("naive loop") or [*sides.values()][-1]
        assert float(time) == naive["times_slower"]
        peaks = naive["peak_mib"], ours["peak_mib"]
        assert float(memory) == pytest.approx(peaks[0] / peaks[1], abs=0.051)


def fwlab_by(axis: str) -> dict[str, dict[int, float]]:
    """Milliseconds of fwlab per operation, by "T" or "batch"."""
    times = defaultdict(dict)
    for row in sizes()["lengths" if axis == "T" else "batches"]:
        if row["form"] == "fwlab":
            times[row["op"]][row[axis]] = row["milliseconds"]
    return times


def test_lengths_agree_with_the_results(labels, html):
    by_op = fwlab_by("T")
    softmax = by_op.pop("softmax_attention")
    for op, line in by_op.items():
        first, last = min(line), max(line)
        said = f"{line[first]:,.2f} at T {first:,} and {line[last]:,.0f} at {last:,}"
        assert f"{op}, {said}" in labels["lengths"]
        row = rf"<code>{op}</code></td><td>[^<]*</td><td>from T = ([\d,]+)</td>"
        match = re.search(row, html)
        if match:  # between the last length where it is slower, and the next
            at = int(match[1].replace(",", ""))
            assert f"than softmax attention from T = {match[1]}" in labels["lengths"]
            slower = max(T for T in line if line[T] > softmax[T])
            next_one = min(T for T in line if slower < T)
            assert 0.95 * slower <= at <= 1.05 * next_one


def test_batches_agree_with_the_results(labels):
    for op, line in fwlab_by("batch").items():
        if op != "softmax_attention":
            last = max(line)
            said = f"{line[1]:,.2f} at batch 1 and {line[last] / last:,.0f} at {last}"
            assert f"{op}, {said}" in labels["batches"]


def test_decoding_agrees_with_the_results(labels):
    for row in bench()["decoding"]:
        (_, first), *_, (at, last) = row["microseconds"].items()
        said = f"{row['layer']} from {first:,.0f} to {last:,.0f} at {int(at):,} tokens"
        assert said in labels["decoding"]


def test_generation_agrees_with_the_results(labels, html):
    speed = defaultdict(dict)
    for row in speeds()["generation"]:
        speed[row["model"]][row["context"]] = 1e6 / row["microseconds"]
    theirs = speed["nanoGPT"]
    for name, line in speed.items():
        words = f"{name} from {line[64]:,.0f} to {line[8192]:,.0f}"
        assert words in labels["generation"]
        crosses = re.search(
            f"{words}, faster than nanoGPT from ([\\d,]+)", labels["generation"]
        )
        if crosses:
            at = int(crosses[1].replace(",", ""))
            slower = max(T for T in line if line[T] < theirs[T])
            assert 0.95 * slower <= at <= 1.05 * 2 * slower
            assert f"<td>from {crosses[1]}</td>" in html


def more(name: str) -> tuple[list[dict], dict, dict, dict]:
    """The results with one more point for one of the plots."""
    all_, run, other, generation = copy.deepcopy(results())
    if name == "losses":
        seed = copy.deepcopy(all_[0])
        seed["validation_loss"] += 0.05
        all_.insert(1, seed)
    elif name == "curves":
        step, *loss = all_[0]["curve"][-1]
        all_[0]["curve"].append([step + 250, *loss])
    elif name == "operations":
        for row in [r for r in run["rows"] if r["case"] == "aft_simple"]:
            run["rows"].append({**row, "case": "another"})
    elif name in ("lengths", "batches"):
        axis = "T" if name == "lengths" else "batch"
        last = other[name][-1]
        other[name].append({**last, axis: 2 * last[axis]})
    elif name == "generation":
        last = generation[name][-1]
        generation[name].append({**last, "context": 2 * last["context"]})
    else:
        run["decoding"][-1]["microseconds"]["10000"] = 2000.0
    return all_, run, other, generation


def shapes(figure, *_) -> list[str]:
    """What a plot draws, before it is put on paper, which costs the most."""
    figure.canvas.draw_idle()
    data = [line.get_xydata() for ax in figure.axes for line in ax.lines]
    data += [patch.get_path().vertices for ax in figure.axes for patch in ax.patches]
    data += [c.get_offsets() for ax in figure.axes for c in ax.collections]
    return [points.tolist() for points in data]


@pytest.mark.parametrize("name", NAMES)
def test_one_point_more_is_another_drawing(monkeypatch, name):
    monkeypatch.setattr(plots, "drawn", shapes)
    drawn = draw(name, *results())
    assert drawn and draw(name, *results()) == drawn
    assert draw(name, *more(name)) != drawn


@pytest.mark.slow
def test_same_numbers_same_bytes():
    for name in NAMES:
        drawn = [draw(name, *results()) for _ in range(2)]
        assert drawn[0] == drawn[1], name


def test_places_keep_their_distance_and_stay_inside():
    places = plots.spread([-0.2, 0.0, 0.01, 0.5, 0.99, 1.0], 0.1)
    assert all(b - a > 0.1 - 1e-9 for a, b in pairwise(places))
    assert places[0] >= 0 and places[-1] <= 1 + 1e-9
    assert plots.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])


def test_without_scripts_a_wide_table_scrolls(look):
    tab = look(PAGE, width=390, java_script_enabled=False)
    boxes = tab.locator("article table").evaluate_all(
        """tables => tables.filter((t) => t.scrollWidth > t.clientWidth)
          .map((t) => [getComputedStyle(t).overflowX, t.clientWidth <= innerWidth])"""
    )
    assert boxes and {tuple(box) for box in boxes} == {("auto", True)}


def test_hybrids_are_those_of_their_files(html):
    """A row for each stack, with all its seeds; best first, and equally large."""
    section = html[html.index('<h2 id="hybrids"') :]
    section = section[: section.index("<h2", 4)]
    row = r"<tr><td><code>([^<]*)</code></td>\s*<td><strong>([\d.]+)</strong></td>\s*"
    rows = re.findall(row + r"<td>([^<]*)</td>\s*<td>([\d,]+)</td>", section)
    losses, softmax = defaultdict(list), runs_of("softmax")[0]["parameters"]
    paths = sorted(RESULTS.glob("hybrid-cpu-*.json"))
    hybrids = [json.loads(path.read_text("utf-8")) for path in paths]
    for run in [*hybrids, *runs_of("transformer-xl")]:
        config = run["config"]
        assert config["steps"] == 2000 and config["d_model"] == 128
        assert abs(run["parameters"] / softmax - 1) < 0.02
        losses[config["mixer"], config.get("like")].append(run["validation_loss"])
    found = {}
    for name, loss, seeds, _ in rows:
        name = unescape(name)
        mixer, like = re.match(r"'?([\w*,-]+)'?(?:.* --like (\w+))?", name).groups()
        found[mixer, like] = [float(seed) for seed in seeds.split(", ")]
        assert float(loss) == pytest.approx(mean(losses[mixer, like]), abs=5.1e-4)
    assert found == {
        key: [round(loss, 3) for loss in seeds] for key, seeds in losses.items()
    }
    means = [float(loss) for _, loss, *_ in rows]
    assert means == sorted(means)


def test_findings_are_those_of_the_files():
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    adding, forgetting, speed = re.findall(r"^\d\. \*\*.*$", page, re.MULTILINE)
    failed = page.partition("### What failed\n\n")[2].partition("\n")[0]
    losses, usual, fast = final(), defaultdict(list), defaultdict(list)
    text = (RESULTS / "language-model.json").read_text("utf-8")
    for p in json.loads(text)["points"]:
        if (p["block"], p["carry"], p["size"]) == (64, 0, "nanogpt-1000"):
            rate = usual if p["lr"] == 0.001 else fast
            rate[p["mixer"], p["map"]].append(p["loss"])
    loss = {name: f"{mean(seeds):.2f}" for name, seeds in losses.items()}
    middle = {name: f"{median(seeds):.2f}" for name, seeds in usual.items()}
    assert f"at {loss['delta']} nats" in adding and f"at {loss['sum']} (" in adding
    text = (RESULTS / "replacing.json").read_text("utf-8")
    ends = defaultdict(list)
    for p in json.loads(text)["points"]:
        ends[p["layer"], p["conv_size"]].append(p["loss"])
    end = {name: f"{median(seeds):.2f}" for name, seeds in ends.items()}
    control = [end["delta without removal", size] for size in (0, 4)]
    assert f"at {control[0]} without it and at {end['delta', 0]} with" in adding
    assert f"the sum rule then ends at {end['sum', 4]} and" in adding
    assert f"the delta rule at {end['delta', 4]}, and" in adding
    dpfp = [end["delta, DPFP", size] for size in (0, 4)]
    assert f"removal at {control[1]}. The delta rule with DPFP" in adding
    assert f"still ends at {dpfp[1]}." in adding
    gated = [end["gated", size] for size in (0, 4)]
    falls = "falls from {} to {}, and that of the gated rule from {} to {}."
    assert falls.format(*dpfp, *gated) in forgetting
    both = [end["gated delta, unit keys", size] for size in (4, 0)]
    assert "at {}; without one, at {}, where the gated".format(*both) in forgetting
    assert min(end.values()) == both[0] and both[1] == gated[0]
    dpfp, plain = middle["delta", "dpfp"], middle["delta", "identity"]
    assert f"{dpfp} against {middle['sum', 'dpfp']}" in adding
    assert loss["gated"] == loss["fwp"]
    assert f"both end at {loss['fwp']}" in forgetting
    assert 0.05 < mean(losses["delta"]) - mean(losses["fwp"]) < 0.15
    assert f"from {dpfp} to {middle['gated-delta', 'dpfp']}" in forgetting
    assert f"features take it to {plain}" in forgetting
    assert f"both, it ends at {middle['gated-delta', 'identity']}" in forgetting
    assert f"gated rule ({middle['gated', 'linear']})" in forgetting
    assert f"`fwp` ({middle['fwp', '']})" in forgetting
    lowest = {name: median(seeds) for name, seeds in fast.items()}
    assert all(loss < median(usual[name]) for name, loss in lowest.items())
    names = ("fwp", ""), ("gated", "linear"), ("gated-delta", "identity")
    text = "`fwp` at {:.2f}, the gated rule at {:.2f}, both together at {:.2f}."
    assert text.format(*(lowest[name] for name in names)) in forgetting
    rows = {
        row["side"]: row
        for row in bench()["rows"]
        if (row["case"], row["shape"]["T"]) == ("delta_rule", 4096)
    }
    naive, efficient = rows["naive"], rows["efficient"]
    assert round(naive["milliseconds"] / efficient["milliseconds"]) == 20
    assert round(naive["peak_mib"] / efficient["peak_mib"]) == 10
    assert "a twentieth of the time and a tenth of the memory" in speed
    # A step of delta in steps of softmax: in three files, of three ways to wait.
    steps = json.loads((RESULTS / "steps-cpu.json").read_text("utf-8"))["steps"]
    times = {row["T"]: row["softmax_steps"] for row in steps if row["mixer"] == "delta"}
    rates = {row["mixer"]: row["tokens_per_second"] for row in bench()["mixers"]}
    most = rates["softmax"] / rates["delta"]
    assert f"{times[64]:.1f} to {most:.1f} times as long" in speed
    assert f"in windows of 1,024, {times[1024]:.1f} times" in speed
    text = (RESULTS / "state-size.json").read_text("utf-8")
    carried = defaultdict(list)
    for point in json.loads(text)["points"]:
        if point["map"] == "linear" and point["size"] == "nanogpt":
            carried[point["model"], point["normalize"]].append(point["loss"])
    ends = [f"{median(carried[key]):.2f}" for key in (("delta", 0), ("sum", 1))]
    assert "at {} nats per character and the sum rule at {}".format(*ends) in failed


def no_memory() -> list[float]:
    """The losses of the control, by seed."""
    text = (RESULTS / "language-model.json").read_text("utf-8")
    own = [p for p in json.loads(text)["points"] if p["mixer"] == "convolution"]
    assert [(p["size"], p["seed"]) for p in own] == [("nanogpt", n) for n in (1, 2, 3)]
    return [p["loss"] for p in own]


def test_the_readme_has_the_losses_of_every_run(html):
    text = (ROOT / "README.md").read_text("utf-8")
    rows = final() | {"convolution alone, no memory": no_memory()}
    for mixer, losses in rows.items():
        seeds = ", ".join(f"{x:.3f}" for x in losses)
        assert f"| {mixer} | {seeds} |" in text
        name = mixer if " " in mixer else f"<code>{mixer}</code>"
        row = f"<td>{name}</td>\n<td><strong>{mean(losses):.3f}</strong></td>"
        assert re.search(rf"{row}\n<td>({seeds}|one seed)</td>", html), mixer


def test_no_bare_mixer_but_feedback_is_below_no_memory():
    """What README and the results say of windows of 64 characters."""
    below = {name for name, seeds in final().items() if min(seeds) < max(no_memory())}
    assert below == {"feedback", "feedback-shared"}
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert f"without any memory ends at {mean(no_memory()):.2f}" in page


def test_attention_by_distance_is_below_every_fast_weight_rule():
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    loss = {name: mean(seeds) for name, seeds in final().items()}
    rules = ("sum", "gated", "delta", "gated-delta", "fwp")
    ends = loss["transformer-xl"]
    assert loss["softmax"] > loss["delta"]
    assert max(final()["transformer-xl"]) < min(loss[rule] for rule in rules)
    text = "ends at {:.2f} (mean of three seeds), below every bare fast weight rule, though"
    lead = f"{loss['gated'] - ends:.2f}"
    assert f"{text.format(ends)} only {lead} below the gated rule, which" in page
    layers = [
        mean(
            json.loads(path.read_text("utf-8"))["validation_loss"]
            for path in RESULTS.glob(f"hybrid-cpu-{name}-seed*.json")
        )
        for name in ("kimi-delta", "gated-delta")
    ]
    low, high = (f"{ends - layer:.2f}" for layer in layers)
    bare = f"{loss['gated-delta'] - layers[1]:.2f} below its bare rule, which"
    assert f"{low} to {high} below it; Gated DeltaNet ends {bare}" in page


def test_pages_of_kernels_say_what_was_measured():
    """At their top; and of which GPU each rate and each time is."""
    for path in sorted((ROOT / "docs" / "kernels").glob("*.md")):
        page = path.read_text("utf-8")
        page = page if path.stem == "index" else page.partition("\n# ")[2]
        paragraphs = page.split("\n\n")
        index = path.stem == "index"
        top = "Counted, then measured" if index else "Counted, not measured"
        # On the first one, after a sentence and a picture of each.
        assert paragraphs[5 if index else 1].startswith(f"**{top}.**")
        for paragraph in paragraphs:
            told = re.search(r"\b(TB|GB|TFLOP)/s|\d ms\b|\d µs\b", paragraph)
            assert not told or re.search("H[12]00", paragraph), paragraph
        measured = "results.md#on-a-gpu" in page or "no kernel on this page" in page
        assert measured, path


def test_bars_of_kernels_are_the_longest_of_each_operation():
    drawn = kernels._peers()
    for op, (_, times) in drawn["rows"].items():
        same = [row for row in drawn["run"]["rows"] if row["op"] == op]
        longest = max(row["shape"]["T"] for row in same)
        rows = [row for row in same if row["shape"]["T"] == longest]
        assert times == {row["side"]: row["ms"] for row in rows}
    faster = f"faster than fla in {sum(x > 1 for x in drawn['ratios']['fla'])} of 15;"
    assert faster in drawn["run"]["verdict"] and len(drawn["ratios"]["fla"]) == 15


def test_pages_say_what_the_chosen_forms_save():
    delta, results = (
        (ROOT / "docs" / name).read_text("utf-8")
        for name in ("kernels/delta.md", "results.md")
    )
    cases = kernels._forms()["cases"]
    assert all(now < was for rows in cases.values() for *_, was, now in rows.values())
    shares = {
        case: now / was
        for case, rows in cases.items()
        for *_, was, now in [rows["all of them"]]
    }
    low, high = min(shares.values()), max(shares.values())
    assert f"take {low:.2f} to {high:.2f} times as long" in results
    short = kernels._read(kernels.FORMS)["short"]
    for what, text in (
        ("microseconds", "its kernels took {:.1f} to {:.0f} times as long as chunks"),
        ("peak_mib", "with {:.0f} to {:.0f} times the memory"),
    ):
        ratios = [row["steps"][what] / row["chunks"][what] for row in short]
        assert text.format(min(ratios), max(ratios)) in delta
