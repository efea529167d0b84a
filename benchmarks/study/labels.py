"""Names beside points of a figure, such that none hides another."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

SIZE = 7  # of the letters
NEAR = 10  # points; names that are farther away hang on a thread


class Label(NamedTuple):
    """What is written beside a point; one that is not needed is left out where there is no room."""

    x: float
    y: float
    text: str
    color: str
    needed: bool = True


class Place(NamedTuple):
    """Where a name may stand, in points from its point."""

    offset: tuple[float, float]
    ha: str
    va: str


def places() -> Iterator[Place]:
    """The nearest first."""
    for far in (5, 9, 14, 20, 28, 38, 50):
        yield Place((far, 0), "left", "center")
        yield Place((-far, 0), "right", "center")
        yield Place((0, far), "center", "bottom")
        yield Place((0, -far), "center", "top")
        for up in (far, -far):
            yield Place((far, up), "left", "center")
            yield Place((-far, up), "right", "center")


PLACES = tuple(places())


def write_apart(panel: Axes, given: list[Label], level: float | None = None) -> None:
    """Writes them, those that are needed first; ``level`` is a line across that is not to be hidden."""
    panel.figure.draw_without_rendering()  # or the panel does not know where it is
    renderer = FigureCanvasAgg(panel.figure).get_renderer()
    inside = panel.get_window_extent(renderer)
    at = panel.transData.transform([(one.x, one.y) for one in given])
    points = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    taken = []
    if level is not None:
        _, y = panel.transData.transform((1, level))
        taken.append(Bbox.from_extents(inside.x0, y - 3, inside.x1, y + 3))
    for own in sorted(range(len(given)), key=lambda i: not given[i].needed):
        one = given[own]
        said = panel.annotate(
            one.text, (one.x, one.y), (0, 0), textcoords="offset points", size=SIZE, color=one.color
        )
        hidden, place = best_place(said, inside, points[:own] + points[own + 1 :] + taken, renderer)
        far = max(map(abs, place.offset)) > NEAR
        if not one.needed and (hidden or far):
            said.remove()
            continue
        said.set(position=place.offset, ha=place.ha, va=place.va)
        taken.append(said.get_window_extent(renderer))
        if far:
            thread = {"arrowstyle": "-", "lw": 0.5, "color": one.color}
            panel.annotate(
                "", (one.x, one.y), place.offset, textcoords="offset points", arrowprops=thread
            )


def best_place(
    said: Annotation, inside: Bbox, others: list[Bbox], renderer: Any
) -> tuple[int, Place]:
    """How much it hides, and where: the first place where that is least."""

    def hidden(place: Place) -> int:
        said.set(position=place.offset, ha=place.ha, va=place.va)
        box = said.get_window_extent(renderer)
        outside = box.x0 < inside.x0 or box.y0 < inside.y0 or box.x1 > inside.x1 + 20
        return sum(box.overlaps(other) for other in others) + 3 * outside

    return min(((hidden(place), place) for place in PLACES), key=lambda found: found[0])
