"""Tables of the study of lengths and sizes, from the rows that are there: two pages are made of them.

Each setting is read in two ways. "Loss after N tokens" compares last losses. "Tokens to a loss, each with a
schedule made for it" reads off, from a line through the last losses of AdamW over the logarithm of its
tokens, where it comes to the loss of a method. Differences are those of `paired`.
"""

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import report
from report import Rows

from goal import lengths, pages
from goal.contenders import OUTERS, REASONS, TRIED
from goal.curves import hyper_of, size
from goal.lengths import TOKENS, WORKERS
from goal.model import STEPS, WIDTH
from goal.settings import BASE, Cell, Key, cells_of, last, reading

GOAL = 0.03  # bits per byte behind float32 Lion, of the vote


def setting(steps: int, tokens: int = TOKENS, width: int = WIDTH, data: str = "alike") -> Key:
    return Key(data, tokens, WORKERS, width, steps)


LENGTHS = tuple(setting(steps) for steps in (STEPS, 1024, 4096))
NOISY, LARGE = LENGTHS[1], setting(512, 2048)
COLUMNS = {
    LENGTHS[0]: "256 steps", NOISY: "1,024 steps", LENGTHS[2]: "4,096 steps",
    LARGE: "512 steps of 2,048 tokens",
}  # fmt: skip


class Study:
    """All cells of the rows of both files."""

    def __init__(self, rows: Rows):
        self.cells = cells_of(rows)

    def cell(self, key: Key) -> Cell:
        return self.cells.get(key) or Cell(key, {})

    # --- Tables

    def tables(self) -> dict[str, str]:
        """The text of each place on the page."""
        return {
            "learnt": self.learnt(),
            "losses": self.outcome(),
            "lengths": self.losses(COLUMNS),
            "tokens to a loss": self.tokens_to_a_loss(),
            "sizes": self.sizes(),
            "reason": self.reason(),
            "not run": self.not_run(),
        }

    def names(self) -> list[str]:
        """The methods of all lengths, the least loss after 1,024 steps first."""
        known = {name for key in COLUMNS for name in self.cell(key).rows} - set(TRIED)

        def place(name: str) -> tuple[float, ...]:
            return tuple(
                difference.value if (difference := self.cell(key).behind(name)) else math.inf
                for key in (NOISY, *LENGTHS, LARGE)
            )

        return sorted(known, key=lambda name: (place(name), name))

    def losses(self, columns: Mapping[Key, str]) -> str:
        """The first reading: last losses, less AdamW's, in settings by their titles.

        A column has one interval, in the last line; where a method ran with fewer seeds it stands beside.
        """
        cells = {key: self.cell(key) for key in columns}
        names = [name for name in self.names() if any(name in cell.rows for cell in cells.values())]
        usual = {key: usual_error(cell, names) for key, cell in cells.items()}

        def text(key: Key, name: str) -> str:
            cell = cells[key]
            if name not in cell.rows:
                return ""
            if name not in cell.losses:
                return "diverged"
            if name == BASE:
                return f"{cell.pooled.means[BASE]:.3f}"
            difference = cell.behind(name)
            if difference is None:
                return ""
            if difference.error is None or rounded(difference.error) != usual[key]:
                return difference.text()
            return f"{difference.value:+.3f}{'*' * (abs(difference.value) <= difference.error)}"

        lines = [
            [
                f"`{pages.code_of(name)}`", f"{pages.bits(name, WORKERS):.2f}",
                *(text(key, name) for key in columns),
            ]
            for name in names
        ]  # fmt: skip
        last = ["±", "", *("" if usual[key] is None else f"{usual[key]:.3f}" for key in columns)]
        return report.markdown(["method", "bits", *columns.values()], [*lines, last])

    def tokens_to_a_loss(self) -> str:
        """The second reading: tokens over those of AdamW to the same loss."""
        goals = [key for key in LENGTHS[1:] if BASE in self.cell(key).losses]
        lines = []
        for name in self.names():
            cells = [self.ratio(name, key) for key in goals]
            if name != BASE and any(cells):
                lines.append([f"`{pages.code_of(name)}`", *cells])
        head = ["method", *(f"runs of {key.steps:,} steps" for key in goals)]
        return report.markdown(head, lines)

    def ratio(self, name: str, goal: Key) -> str:
        """Tokens of a method to a loss, over AdamW's; "" where no line comes there."""
        read = reading(name, self.cells, goal)
        if read is None:
            return ""
        about, sure = "about " * read.beyond, f" ± {read.error:.2f}" if read.error else ", one seed"
        return f"{about}{read.ratio:.2f}{sure}"

    def reason(self) -> str:
        """Votes with one part changed, less float32 Lion, whose rate, betas and decay they have."""
        cell = self.cell(NOISY)
        lines = [
            [
                f"`{pages.code_of(name)}`",
                f"{pages.bits(name, WORKERS):.2f}",
                difference.text(),
                *(mean_of(cell.rows[name], what) for what in ("tie", "agree")),
            ]
            for name in ("vote", *REASONS, "owner-lion")
            if (difference := cell.behind(name, "lion"))
        ]
        head = [
            "method",
            "bits",
            "loss less that of Lion",
            "ties",
            "votes that agree with the mean",
        ]
        return report.markdown(head, lines)

    def sized(self) -> dict[int, Cell]:
        """The cells of 1,024 steps by the number of parameters."""
        alike = NOISY._replace(width=0)
        return {
            size(key.width): cell
            for key, cell in self.cells.items()
            if key._replace(width=0) == alike
        }

    def sizes(self) -> str:
        """Losses of each width less those of AdamW, and best rates over its own."""
        names = ("lion", "vote", "owner-adamw")
        codes = {name: f"`{pages.code_of(name)}`" for name in names}
        lines = []
        for parameters, cell in self.sized().items():
            far = [cell.behind(name) for name in names]
            rates = [rate_over(cell, name) for name in names]
            lines.append([
                f"{parameters:,}",
                *(difference.text() if difference else "not run" for difference in far),
                *("" if rate is None else f"{rate:.2f}" for rate in rates),
            ])  # fmt: skip
        head = ["parameters", *codes.values(), *(f"rate of {code}" for code in codes.values())]
        grown = {code: self.growth(name) for name, code in codes.items()}
        sentences = "".join(f"* {code}: {text}\n" for code, text in grown.items() if text)
        return report.markdown(head, lines) + "\n" * bool(sentences) + sentences

    def growth(self, name: str) -> str:
        """A line through distances, and one through rates, over the logarithm of the size."""
        far, rates = [], []
        for parameters, cell in self.sized().items():
            size, difference, rate = (
                math.log(parameters, 4),
                cell.behind(name),
                rate_over(cell, name),
            )
            if difference and difference.error:
                far.append((size, difference.value, difference.error / 1.96))
            if rate:
                rates.append((size, math.log2(rate), 2**0.5 * OCTAVE))
        if len(far) < 3 or len(rates) < 3:
            return ""
        (loss, error), (rate, octaves) = slope_of(far), slope_of(rates)
        return (
            f"each fourfold size moves the distance to AdamW by {loss:+.3f} ± {error:.3f}. "
            f"The best rate over AdamW's changes by a factor of {2**rate:.2f} "
            f"({2 ** (rate - octaves):.2f} to {2 ** (rate + octaves):.2f})."
        )

    def not_run(self) -> str:
        """Seeds of the plan that are not in the rows: those that ran, and those planned."""
        lines = []
        for part, says in PARTS.items():
            have = {job: self.seeds_of(job) for job in lengths.PARTS[part]}
            missing = [
                f"{job.contender}{f', width {job.width}' * (job.width != WIDTH)}: {n} of {job.seeds}"
                for job, n in have.items()
                if n < job.seeds
            ]
            lines += [[says, "<br>".join(missing)]] if missing else []
        table = report.markdown(["part", "seeds"], lines)
        return table if lines else "All that was planned was run.\n"

    def seeds_of(self, job: lengths.Job) -> int:
        """The number of seeds of a job that have run."""
        rows = self.cell(setting(job.steps, job.tokens, job.width, job.data)).rows
        names = OUTERS.get(job.contender, (job.contender,))
        return max(len(rows.get(name, ())) for name in names)

    # --- Sentences

    def learnt(self) -> str:
        """Sentences, each with its error; what is not there yet is said."""
        longer = {says: self.by_steps(name, LENGTHS) for name, says in OURS.items()}
        sentences = {
            "the vote beside float32 Lion": (
                f"**Votes and float32 Lion** (the goal is at most {GOAL:+}). `lion_cub`: ",
                self.by_steps("vote", LENGTHS[1:], "lion") + self.by_method(REMEDIES, "lion"),
            ),
            "methods after 1,024 steps": (
                "**1,024 steps, and float32 AdamW.**", self.by_method(OURS | OTHERS)
            ),
            "Muon": ("**Muon in codes.**", self.muon()),
            "the length of a run": (
                "**Longer runs, and float32 AdamW.**",
                "".join(f" {says}: {text}" for says, text in longer.items() if text),
            ),
            "accumulation and local steps": (
                "**Fewer exchanges of as many tokens, and float32 AdamW.**",
                self.by_method(EXCHANGES),
            ),
            "the size of the model": (
                "**The size of the model.** For `lion_cub` ", self.growth("vote")
            ),
        }  # fmt: skip
        return "".join(
            f"{n}. {lead}{text}\n" if text else f"{n}. Not measured yet: {about}.\n"
            for n, (about, (lead, text)) in enumerate(sentences.items(), 1)
        )

    def muon(self) -> str:
        """`owner_muon` beside float32 AdamW and float32 Muon, and how many tokens it needs."""
        texts = []
        for key, says in COLUMNS.items():
            cell = self.cell(key)
            adamw, muon = cell.behind("owner-muon"), cell.behind("owner-muon", "muon")
            if adamw and muon:
                tokens = self.ratio("owner-muon", key)
                texts.append(
                    f" After {says}: {adamw.text()} beside float32 AdamW, {muon.text()} beside float32 Muon"
                    + f", and {tokens} of AdamW's tokens to the same loss." * bool(tokens)
                    + "." * (not tokens)
                )
        return "".join(texts)

    def outcome(self) -> str:
        """One sentence for a first page: the last losses of ours, less that of float32 AdamW."""
        known = [
            f"by {difference.value:+.3f} ± {difference.error:.3f} with `{says}` "
            f"({pages.bits(name, WORKERS):.2g} bits a parameter)"
            for name, says in FIRST.items()
            if (difference := self.cell(NOISY).behind(name))
        ]
        said = (
            f"After {NOISY.steps:,} steps the loss differs from that of float32 AdamW, in bits per byte, "
            f"{', '.join(known[:-1])}, and {known[-1]}. Float32 AdamW sends "
            f"{pages.bits(BASE, WORKERS):.0f} bits a parameter."
        )
        return textwrap.fill(said, 118) + "\n"

    def by_steps(self, name: str, settings: Iterable[Key], other: str = BASE) -> str:
        """Differences to another method in each setting where both ran; a sentence, or nothing."""
        known = [
            f"{difference.text()} after {key.steps:,}"
            for key in settings
            if (difference := self.cell(key).behind(name, other))
        ]
        return f"{', '.join(known)} steps." if known else ""

    def by_method(self, names: Mapping[str, str], other: str = BASE) -> str:
        """Differences of methods to another after 1,024 steps, with their bits, a sentence for each."""
        return "".join(
            f" {says} ({pages.bits(name, WORKERS):.2g} bits): {difference.text()}."
            for name, says in names.items()
            if (difference := self.cell(NOISY).behind(name, other))
        )


OURS = {
    "owner-adamw": "`owner_adamw`", "owner-lion": "`owner_lion`",
    "vote-2-bits": "`lion_cub` with 2 bits up", "vote": "`lion_cub`",
}  # fmt: skip
OTHERS = {"powersgd-16": "PowerSGD of rank 16", "one-bit-adam": "1-bit Adam"}
FIRST = {"owner-muon": "owner_muon", "owner-adamw": "owner_adamw", "vote": "lion_cub"}
EXCHANGES = {
    "adamw-micro-4": "AdamW with 4 micro-steps", "adamw-micro-16": "With 16",
    "vote-micro-4": "`lion_cub` with 4", "vote-micro-16": "With 16",
    "local-8-coded": "The mean of 8 local steps of AdamW in codes",
    "diloco-32-coded-6": "DiLoCo in codes with 32",
}  # fmt: skip
REMEDIES = {
    "vote-alike": "At Lion's rate", "vote-2": "Then with 2 bits up",
    "vote-sync-64": "With a sync every 64 steps",
    "vote-tie-0": "With ties that are 0", "vote-4": "With 4 bits up",
    "vote-mean": "With the mean of the signs", "owner-lion": "`owner_lion`",
}  # fmt: skip
PARTS = {
    "1024": "1,024 steps", "reason": "why votes are behind Lion",
    "tokens": "512 steps of 2,048 tokens", "4096": "4,096 steps", "ladder": "sizes", "256": "256 steps",
    "different": "data that differ",
}  # fmt: skip
OCTAVE = 12**-0.5  # error of a best rate that is known to an octave, as a logarithm to base 2


def usual_error(cell: Cell, names: Iterable[str]) -> float | None:
    """The error of most differences of a cell to AdamW, rounded as pages have it."""
    found = [difference for name in names if name != BASE and (difference := cell.behind(name))]
    return statistics.mode([rounded(one.error) for one in found]) if found else None


def rounded(error: float | None) -> float | None:
    return None if error is None else round(error, 3)


def mean_of(rows: Rows, what: str) -> str:
    """The mean of a share over seeds and points, where rows have it."""
    shares = [x for row in rows for x in row.get(what, ())]
    return f"{statistics.fmean(shares):.2f}" if shares else ""


def rate_over(cell: Cell, name: str) -> float | None:
    """The best rate of a method over AdamW's; each is the least of a parabola where three were tried."""
    if name not in cell.rows or BASE not in cell.rows:
        return None
    return best_rate(cell, name) / best_rate(cell, BASE)


def best_rate(cell: Cell, name: str) -> float:
    """The rate of the least loss on the first seed, between the tries next to it."""
    tried = {
        math.log2(hyper_of(row).rate): last(row)
        for row in cell.all[name]
        if row["seed"] == 0 and hyper_of(row)[1:] == hyper_of(cell.rows[name][0])[1:]
    }
    rates = sorted(tried)
    best = min(rates, key=tried.__getitem__)
    place = rates.index(best)
    near = rates[max(place - 1, 0) : place + 2]
    losses = [tried[rate] for rate in near]
    if len(near) == 3 and math.isfinite(sum(losses)):
        bend, slope, _ = np.polyfit(near, losses, 2)
        best = -slope / (2 * bend)
    return 2.0**best


def slope_of(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The slope of a line through ``(x, y, deviation of y)``, and half of its 95 % interval."""
    x, y, std = np.array(points).T
    weights = 1 / std**2
    away = x - np.average(x, weights=weights)
    spread = np.sum(weights * away**2)
    return float(np.sum(weights * away * y) / spread), float(1.96 / np.sqrt(spread))
