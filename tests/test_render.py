"Pictures: nothing a plan does may stop the pen, and what is drawn must be true."
from itertools import combinations
from xml.etree import ElementTree
import os
import subprocess
import sys

from hypothesis import given, settings, strategies as st
from PIL import Image
import numpy as np
import pytest

from lake_engineer.lake import Instance, Lake, LakeError, Plan, check, unparsable
from lake_engineer.render import (_ffmpeg, AGENT_COLORS, DASHES, INK, RED, SNOW, WATER, Mark, Panel, animate, draw, figure, luminance, positions, scene, side_by_side,
                                  to_ansi, to_array, to_html)

INST = Instance(Lake(4, {(0, 0), (0, 3), (3, 0), (3, 3)}), [(0, 1), (1, 0)], [(3, 2), (2, 3)], "corners", optimal_makespan=5, optimal_sum_of_costs=9)
GOOD = Plan([[(0, 1), (1, 1), (1, 2), (2, 2), (3, 2)], [(1, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 3)]])
CROSS = Plan([GOOD.paths[0], [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3)]])

cells = st.tuples(st.integers(-3, 6), st.integers(-3, 6)) | st.tuples(st.integers(), st.integers())
plans = st.lists(st.lists(cells, max_size=6), max_size=7).map(Plan)
times = st.none() | st.floats(0, 9)

def svg(html: str) -> ElementTree.Element: return ElementTree.fromstring(html[html.index("<svg"):html.index("</svg>") + 6])

def has_color(pixels: np.ndarray, color: str) -> bool:
    return bool((pixels == [int(color[k:k + 2], 16) for k in (1, 3, 5)]).all(-1).any())


@settings(max_examples=50, deadline=None)
@given(plans, times)
def test_any_plan_can_be_shown_in_a_notebook_and_a_terminal(plan, t):
    root = svg(to_html(INST, plan, t))
    for m in scene(INST, plan, t): assert all(-1.5 <= v <= 5.5 for p in m.points for v in p)
    assert len(root) == len(scene(INST, plan, t, check(INST, plan)))
    assert len(to_ansi(INST, plan, int(t or 0)).splitlines()) >= 6

@settings(max_examples=15, deadline=None)
@given(plans, times)
def test_any_plan_can_be_drawn(plan, t):
    assert to_array(figure([(INST, Panel(plan))], t=t), dpi=20).ndim == 3

def test_svg_needs_no_drawing_library():
    code = ("import sys; from lake_engineer.lake import *; i = Instance(Lake(3), [(0, 0)], [(2, 2)]); assert '<svg' in i._repr_html_(); "
            "print([m for m in ('matplotlib', 'PIL', 'torch', 'pandas') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"

def test_an_instance_shows_itself_as_text_in_a_terminal():
    from IPython.lib.pretty import pretty
    assert str(INST) == pretty(INST) == to_ansi(INST, color=False).rstrip("\n") and str(INST).splitlines()[2] == " 1  .  .  . "
    assert repr(INST).startswith("Instance(lake=")

def test_markup_in_an_id_or_title_is_text():
    html = to_html(Instance(INST.lake, INST.starts, INST.goals, "<b>&"), title="<i>")
    assert "<b>" not in html and "&lt;b&gt;&amp;" in html and "&lt;i&gt;" in html

def test_every_agent_and_goal_has_its_number_in_every_size():
    for n, k in ((3, 5), (10, 5), (10, 1)):
        spots = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)][:k]
        inst = Instance(Lake(n), spots, [(n - 1 - r, n - 1 - c) for r, c in spots[::-1]])
        assert sorted(t.text for t in svg(to_html(inst)).iter("{http://www.w3.org/2000/svg}text")) == sorted([*map(str, range(k))] * 2)
        plain = to_ansi(inst, color=False)
        assert all(str(i) in plain.split("\n", 1)[1] and "abcde"[i] in plain.split("\n", 1)[1] for i in range(k))

def test_red_means_fault():
    def pixels(plan): return to_array(side_by_side(INST, [Panel(plan)]))
    assert has_color(pixels(CROSS), RED) and not has_color(pixels(GOOD), RED) and not has_color(pixels(None), RED)
    assert has_color(to_array(side_by_side(INST, [Panel(verdict=unparsable(INST, "no_answer"))])), RED)
    assert not has_color(to_array(figure([(INST, Panel(CROSS, judge=False))])), RED)

def test_the_fault_shows_once_it_has_happened():
    late = Plan([GOOD.paths[0], [(1, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 3)]])
    v = check(INST, late)
    assert v.first_fault and v.first_fault.time == 5
    assert not any(m.edge == RED for m in scene(INST, late, 4.9, v)) and any(m.edge == RED for m in scene(INST, late, 5, v))

def test_the_view_stands_still_in_a_film_and_holds_everything():
    off = Plan([[(0, 1), (0, 1), (-1, 1)], [(1, 0), (2, 0), (2, -1)]])
    boxes = {svg(to_html(INST, off, t)).get("viewBox") for t in (None, 0, 1, 1.5, 2)}
    left, top, width, height = map(float, boxes.pop().split())
    assert not boxes and left < -40 and top < -40 and 160 < left + width < 170 and 160 < top + height < 170  # a cell more to the left and above only
    assert len({to_array(figure([(INST, Panel(off))], t=t)).shape for t in (0, 1, 2)}) == 1

@settings(max_examples=50, deadline=None)
@given(plans, times)
def test_nothing_is_drawn_out_of_sight(plan, t):
    left, top, width, height = (float(x) / 40 for x in svg(to_html(INST, plan, t)).get("viewBox").split())
    for m in scene(INST, plan, t, check(INST, plan)):
        assert all(left <= x <= left + width and top <= y <= top + height for x, y in m.points)

def test_agents_stand_where_the_plan_says():
    for t in range(8):
        assert positions(INST, GOOD, t) == {i: (GOOD.at(i, t)[1] + 0.5, GOOD.at(i, t)[0] + 0.5) for i in range(2)}

def test_a_stop_is_marked_and_standing_at_the_end_is_not():
    def bars(plan): return sum(m.kind == "line" and m.width == 0.035 for m in scene(INST, plan))
    assert bars(GOOD) == 2
    assert bars(GOOD.trimmed()) == 2 and bars(Plan([GOOD.paths[0] + ((3, 2),) * 4, GOOD.paths[1]])) == 2
    assert bars(CROSS) == 0
    assert any(m.text == "×3" for m in scene(INST, Plan([GOOD.paths[0], ((1, 0),) * 3 + GOOD.paths[1]])) if isinstance(m, Mark)) is False
    assert any(m.text == "×3" for m in scene(INST, Plan([GOOD.paths[0], ((1, 0),) * 2 + GOOD.paths[1]])))

DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])  # Machado et al. 2009, severity 1, linear RGB
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
TRITANOPIA = np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]])

@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPIA, PROTANOPIA, TRITANOPIA], ids=["usual", "deuteranopia", "protanopia", "tritanopia"])
def test_colours_differ_for_every_eye(eye):
    def seen(color):
        srgb = np.array([int(color[k:k + 2], 16) / 255 for k in (1, 3, 5)])
        linear = np.clip(eye @ np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4), 0, 1)
        return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    gaps = {(a, b): np.abs(seen(a) - seen(b)).max() for a, b in combinations([*AGENT_COLORS, WATER, SNOW], 2)}
    assert min(gaps.values()) > 0.1, min(gaps, key=lambda k: gaps[k])
    assert all(np.abs(seen(c) - seen(RED)).max() > 0.1 for c in (*AGENT_COLORS, SNOW, INK))

def test_trails_differ_in_black_and_white_too():
    assert all(abs(luminance(AGENT_COLORS[i]) - luminance(AGENT_COLORS[j])) > 0.15 or DASHES[i] != DASHES[j] for i, j in combinations(range(5), 2))

def test_numbers_stand_out_from_their_discs():
    marks = scene(Instance(Lake(5), [(0, i) for i in range(5)], [(4, i) for i in range(5)]))
    for disc, number in zip(marks, marks[1:]):
        if disc.kind == "disc": assert number.kind == "text" and abs(luminance(disc.fill) - luminance(number.fill)) > 0.4

def test_draw_on_given_axes_and_on_its_own():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots()
    assert draw(INST, GOOD, ax=ax) is ax
    own = draw(INST, GOOD, t=1.5, title="after", tokens=622)
    assert own.figure is not fig and any("622 tokens" in t.get_text() for t in own.texts)
    plt.close("all")

def test_a_figure_shows_itself_without_pyplot():
    code = ("import sys; from lake_engineer.lake import *; from lake_engineer.render import *; f = figure([(Instance(Lake(3), [(0, 0)], [(2, 2)]), Panel())]); "
            "print(f._repr_png_()[1:4], f._repr_png_() == f._repr_png_(), 'matplotlib.pyplot' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "b'PNG' True False"

def test_films_are_the_same_bytes_and_leave_no_figures_open(tmp_path):
    import matplotlib.pyplot as plt
    before = plt.get_fignums()
    a = animate(INST, [Panel(CROSS, "before"), Panel(GOOD, "after")], tmp_path / "a.gif", smooth=2)
    assert a.read_bytes() == animate(INST, [Panel(CROSS, "before"), Panel(GOOD, "after")], tmp_path / "b.gif", smooth=2).read_bytes()
    with Image.open(a) as im: assert im.n_frames == 2 * GOOD.steps + 1
    assert plt.get_fignums() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a.gif", "b.gif"]

def test_a_film_of_nothing_and_of_a_broken_plan(tmp_path):
    for k, plan in enumerate((None, Plan([]), Plan([[], []]), Plan([[(9, 9)]] * 7))):
        with Image.open(animate(INST, plan, tmp_path / f"{k}.gif", smooth=1, dpi=40)) as im: assert im.n_frames == 1

def test_mp4_without_ffmpeg_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(LakeError, match="needs the program ffmpeg"): animate(INST, GOOD, tmp_path / "a.mp4", smooth=1, dpi=20)
    assert os.listdir(tmp_path) == []

@pytest.mark.skipif(not _ffmpeg(), reason="needs ffmpeg: install it, or pip install imageio-ffmpeg")
def test_mp4(tmp_path):
    film = animate(INST, GOOD, tmp_path / "a.mp4", step_ms=500, hold_ms=1000, smooth=1, dpi=41)
    assert film.read_bytes()[4:8] == b"ftyp" and os.listdir(tmp_path) == ["a.mp4"]
    raw = subprocess.run([_ffmpeg(), "-loglevel", "error", "-i", film, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True).stdout
    height, width = (side // 2 * 2 for side in to_array(side_by_side(INST, [GOOD], t=0), 41).shape[:2])
    pictures = np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3).astype(int)
    assert len(pictures) == GOOD.steps + 1 + 2  # two steps long it rests
    assert abs(pictures[0] - pictures[-1]).max() > 100 and abs(pictures[-1] - pictures[-2]).max() < 30

def test_a_film_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    script = tmp_path / "ffmpeg"
    script.write_text("#!/bin/sh\necho no such codec >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LakeError, match="ffmpeg could not write a.mp4: no such codec"): animate(INST, GOOD, tmp_path / "a.mp4", smooth=1, dpi=20)
    assert os.listdir(tmp_path) == ["ffmpeg"]
