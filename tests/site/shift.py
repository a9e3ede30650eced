"""How much the first screen of a page moves while it comes, on a phone.

That is its cumulative layout shift, over slow 4G and with a processor that is four
times as slow as this one.
"""

from playwright.sync_api import BrowserContext

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
#: 1.6 Mbit/s, in bytes; round trips in milliseconds.
SLOW_4G = {"downloadThroughput": 200_000, "uploadThroughput": 94_000, "latency": 150}
#: The shifts so far, from the start of a page on: when each was, and how large.
WATCH = """globalThis.shifts = [];
new PerformanceObserver((list) => {
  for (const each of list.getEntries())
    if (!each.hadRecentInput) shifts.push([each.startTime, each.value]);
}).observe({ type: "layout-shift", buffered: true });"""


def cumulative(shifts: list[tuple[float, float]]) -> float:
    """Return the largest sum within 5 s without a pause of 1 s, as browsers count it."""
    most = total = 0.0
    begin = last = float("-inf")
    for at, value in shifts:
        if at - last > 1000 or at - begin > 5000:
            begin, total = at, 0.0
        last, total = at, total + value
        most = max(most, total)
    return most


def shift(context: BrowserContext, url: str, slower: int = 4) -> float:
    """Measure the cumulative layout shift of a page in a new tab, which is closed.

    Raises FileNotFoundError if there is no such page: an error page does not move.
    """
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", SLOW_4G | {"offline": False})
    session.send("Emulation.setCPUThrottlingRate", {"rate": slower})
    tab.add_init_script(WATCH)
    answer = tab.goto(url, timeout=120_000)
    if answer is None or not answer.ok:
        raise FileNotFoundError(f"there is no page {url}")
    tab.wait_for_function("document.fonts.status === 'loaded'", timeout=120_000)
    tab.wait_for_timeout(2500)
    shifts = tab.evaluate("shifts")
    tab.close()
    return cumulative(shifts)
