from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from stepcredit.training.progress import Progress, clean, gain_rows
from stepcredit.training.telemetry import Display, LiveDisplay, PlainDisplay, make_display, memory_mb

BASE = {"iteration": 0, "evaluation": {"mean": 0.7, "low": 0.68, "high": 0.72, "prompts": 100}, "seconds": 6.0}


def line(iteration: int, mean: float, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "reward": {"mean": mean, "low": mean - 0.02, "high": mean + 0.02},
        "gain_mean": [0.0, 0.04, -0.02],
        "degenerate_groups": 2,
        "groups": 8,
        "failed_samples": 0,
        "ratio_deviation": 0.0,
        "grad_norm": 0.4125,
        "seconds": 2.5,
        "memory_mb": 812.4,
        "evaluation": None,
        **more,
    }


EVALUATED = line(2, 0.66, evaluation={"mean": 0.75, "low": 0.73, "high": 0.77, "prompts": 100})


class Watch:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 120, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system="standard", **options)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(display: LiveDisplay, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(display.panel())
    return written(console)


def run_through(display: Display) -> None:
    display.start(3, 0, ["compose: credit gain", "batch: 8 x 16"])
    display.phase("evaluation", 50, 100)
    for metrics in (BASE, line(1, 0.6), EVALUATED, line(3, 0.63)):
        for done in range(3):
            display.phase("rollout", done, 3)
        display.iteration(metrics)
    display.message("the reward is slow")
    display.stop()
    display.stop()


def test_plain_lines_one_per_iteration() -> None:
    console = Console(file=io.StringIO())
    watch = Watch()
    display = PlainDisplay(console, watch)
    display.start(10, 0, ["compose: credit gain"])
    for now, metrics in ((6, BASE), (8, line(1, 0.6)), (13, EVALUATED)):
        watch.now = now
        display.iteration(metrics)
    assert written(console).splitlines() == [
        "compose: credit gain",
        "iteration 0/10  held-out 0.700 [0.680, 0.720]",
        "iteration 1/10  reward 0.600 [0.580, 0.620]  +0.000 since start  best 0.600 at 1  no signal in 2/8 groups"
        "  ratio deviation 0.0e+00  grad norm 0.412  812 MB  2.5 s each  0:24 left",
        "iteration 2/10  reward 0.660 [0.640, 0.680]  +0.060 since start  best 0.660 at 2"
        "  held-out 0.750 [0.730, 0.770]  +0.050 since start  best 0.750 at 2  no signal in 2/8 groups"
        "  ratio deviation 0.0e+00  grad norm 0.412  812 MB  2.5 s each  0:34 left",
    ]  # left: 9 x 2 s and the evaluation's 6 s; then 8 x (2 + 5) / 2 s and 6 s


def test_plain_lines_hold_no_control_codes() -> None:
    console = Console(file=io.StringIO(), width=40)
    run_through(PlainDisplay(console))
    text = written(console)
    assert len(text.splitlines()) == 7  # two of the header, four of metrics, one message: none wrapped
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_plain_lines_are_flushed_one_by_one() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()
    PlainDisplay(Console(file=stream)).iteration(BASE)
    assert stream.flushed.endswith("0.720]\n")


def test_a_stream_that_cannot_take_a_text_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = PlainDisplay(Console(file=stream))
    display.message("ein grüner Würfel")
    assert raw.getvalue() == b"ein gr?ner W?rfel\n"
    stream.close()
    display.message("nobody listens")


def test_live_display_draws_in_place_and_gives_the_cursor_back() -> None:
    console = terminal()
    run_through(LiveDisplay(console))
    text = written(console)
    assert "\x1b[?25l" in text
    assert text.count("\x1b[?25h") >= 1
    assert "\x1b[1A" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "compose: credit gain" in plain
    assert "the reward is slow" in plain
    assert "evaluated at iteration 2  0.750 [0.730, 0.770]  +0.050 since start  best 0.750 at 2" in plain
    assert "iteration 3/3" in plain


def test_panel_shows_what_it_must() -> None:
    watch = Watch()
    display = LiveDisplay(terminal(), watch)
    progress = display._progress
    progress.start(10, 0)
    for now, metrics in ((6, BASE), (8, line(1, 0.6)), (13, EVALUATED), (15, line(3, 0.63))):
        watch.now = now
        progress.take(metrics)
    watch.now = 75
    display.phase("rollout", 4, 10)
    rows = [row.rstrip() for row in shown(display).splitlines()]
    assert re.fullmatch(r"iteration 3/10  [ ━╸╺]+  rollout 4/10  1:15 elapsed, about 0:27 left", rows[0])
    assert rows[1:] == [
        "held-out  0.750 [0.730, 0.770]  +0.050 since start  best 0.750 at 2",
        "batch     0.630 [0.610, 0.650]  +0.030 since start  best 0.660 at 2",
        "gain/step   ██    highest +0.040 at step 1",
        "              ▀▀  lowest  -0.020 at step 2",
        "no signal in 2/8 groups  ratio deviation 0.0e+00  grad norm 0.412  812 MB  2.5 s each",
    ]  # left: 7 x (2 x 2 + 1 x 5) / 3 s and 6 s


def test_panel_fits_a_narrow_terminal() -> None:
    display = LiveDisplay(terminal(40))
    display._progress.start(10, 0)
    for metrics in (BASE, line(1, 0.6), EVALUATED):
        display._progress.take(metrics)
    rows = shown(display, 40).splitlines()
    assert len(rows) == 6
    assert all(len(row) <= 40 for row in rows)
    assert "812 MB" in shown(display, 80)


def test_changes_between_evaluations_of_different_size_are_only_about() -> None:
    display = LiveDisplay(terminal())
    display._progress.start(10, 0)
    fewer = {"mean": 0.75, "low": 0.73, "high": 0.77, "prompts": 30}
    for metrics in (BASE, line(1, 0.6, evaluation=fewer)):
        display._progress.take(metrics)
    assert "about +0.050 since start" in shown(display)
    paired = {**fewer, "change": {"mean": 0.04, "low": 0.01, "high": 0.07}}
    display._progress.take(line(2, 0.6, evaluation=paired))
    assert "+0.040 [+0.010, +0.070] since start" in shown(display)


def test_gains_are_bars_and_losses_hang_below() -> None:
    above, below = gain_rows([0.08, 0.01, None, -0.08, -0.001, math.nan])
    assert above.plain.startswith(
        "gain/step ██▁▁          highest +0.080 at step 0".replace("          h", "          h")
    )
    assert below.plain.startswith(" " * 10 + "      ██▔▔    lowest  -0.080 at step 3")
    assert {span.style for span in above.spans} >= {"green"}
    assert {span.style for span in below.spans} >= {"red"}
    narrow, _ = gain_rows([0.1] * 28)
    assert narrow.plain.startswith("gain/step " + "█" * 28 + "  ")
    plain, _ = gain_rows([0.1, 0.05], ascii_only=True)
    assert plain.plain.isascii()
    assert gain_rows(None) == gain_rows([None]) == gain_rows("text") == []
    assert len(gain_rows([0.0, 0.0])) == 2


@pytest.mark.parametrize("value", [None, "x", True, [], {}, math.nan, math.inf, [None], {"mean": None}, [["x"]]])
@pytest.mark.parametrize("make", [lambda: PlainDisplay(Console(file=io.StringIO())), lambda: LiveDisplay(terminal())])
def test_no_missing_or_odd_metric_raises(value: Any, make: Callable[[], Display]) -> None:
    display = make()
    display.start(0, 0, [])
    display.iteration({})
    for metrics in (BASE, EVALUATED):
        for key in metrics:
            display.iteration({**metrics, key: value})
        display.iteration(dict.fromkeys(metrics, value))
        display.iteration({**metrics, "evaluation": {"mean": value, "low": value, "change": value, "prompts": value}})
    if isinstance(display, LiveDisplay):
        display.panel()
    display.stop()


def test_resumed_run_counts_from_where_it_stood() -> None:
    watch = Watch()
    progress = Progress(watch)
    progress.start(10, 6)
    assert progress.remaining is None
    for k, seconds in enumerate((2.0, 2.0, 60.0), 7):  # one iteration that was held up
        watch.now += seconds
        progress.take(line(k, 0.6))
    assert (progress.done, progress.remaining) == (9, 2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a \x1b[31mred\x1b[0m circle", "a red circle"),
        ("title \x1b]0;pwned\x07here", "title here"),
        ("two\nlines\r\nand\ta tab", "two lines and a tab"),
        ("back\x08space \x9b31m", "back space  31m"),
        ("\u202eturned\u2066", "turned"),
        ("unfinished \x1b", "unfinished"),
        ("[bold]not markup[/bold] ü 漢", "[bold]not markup[/bold] ü 漢"),
        (3, "3"),
    ],
)
def test_texts_are_cleaned(text: object, expected: str) -> None:
    assert clean(text) == expected


def test_messages_are_cleaned_and_never_markup() -> None:
    console = terminal()
    display = make_display(console=console)
    display.message("prompt '[red]x[/red]' \x1b[2Jfailed")
    assert "prompt '[red]x[/red]' failed" in written(console)
    assert "\x1b[2J" not in written(console)


def test_the_display_suits_the_console() -> None:
    assert isinstance(make_display(console=terminal()), LiveDisplay)
    assert isinstance(make_display(console=Console(file=io.StringIO(), force_terminal=False)), PlainDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(console=dumb), PlainDisplay)


def test_quiet_says_warnings_only() -> None:
    console = terminal()
    run_through(make_display(quiet=True, console=console))
    assert written(console) == "the reward is slow\n"


def test_memory_is_that_of_a_python_process() -> None:
    before = memory_mb()
    held = bytearray(120_000_000)
    assert 120 < memory_mb() < 100_000
    assert memory_mb() >= before
    assert len(held) == 120_000_000
