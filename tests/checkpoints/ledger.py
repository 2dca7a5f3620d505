"""Text for tiny trained models: ledgers, in which every line follows from the lines before it.

A page of a ledger belongs to one clerk. From line to line the day goes up by one, the cargo by the page's
own step, and colour, ship, good and port go on in lists whose lengths have no common factor: so text is
predictable, needs the line before (and the one before that, for the step), and does not repeat itself.
Now and then a line has a word more, which nobody can foresee. The text is this project's own.
"""

import random

COLOURS = ("red", "amber", "green", "blue", "violet", "white", "black")
SHIPS = (
    "Heron",
    "Lark",
    "Otter",
    "Swift",
    "Beaver",
    "Falcon",
    "Badger",
    "Raven",
    "Marten",
    "Gannet",
    "Puffin",
)
GOODS = (
    "salt",
    "wool",
    "tin",
    "oats",
    "cloth",
    "wine",
    "slate",
    "rope",
    "hides",
    "wax",
    "ale",
    "iron",
    "pitch",
)
PORTS = (
    "York",
    "Leith",
    "Cork",
    "Hull",
    "Deal",
    "Ely",
    "Bath",
    "Rye",
    "Wick",
    "Poole",
    "Fowey",
    "Dover",
    "Lynn",
    "Looe",
    "Bude",
    "Tenby",
    "Oban",
)
CLERKS = (
    "Ada",
    "Boole",
    "Curie",
    "Dirac",
    "Euler",
    "Fermi",
    "Gauss",
    "Hardy",
    "Ito",
    "Jacobi",
    "Klein",
    "Lie",
    "Markov",
    "Noether",
    "Pascal",
)
STEPS = (1, 2, 3, 5)  # of the cargo
MANY = 100  # days and cargoes are counted modulo this


def page(rng: random.Random, lines: int) -> list[str]:
    """A page's lines."""
    day, cargo = rng.randrange(MANY), rng.randrange(MANY)
    step, clerk = rng.choice(STEPS), rng.choice(CLERKS)
    places = [rng.randrange(len(words)) for words in (COLOURS, SHIPS, GOODS, PORTS)]
    written = []
    for line in range(lines):
        colour, ship, good, port = (
            words[(place + line) % len(words)]
            for words, place in zip((COLOURS, SHIPS, GOODS, PORTS), places, strict=True)
        )
        late = " late" if rng.random() < 0.1 else ""
        written.append(
            f"Day {(day + line) % MANY}, {colour} {ship},{late} {(cargo + step * line) % MANY} {good}"
            f" to {port} for {clerk}."
        )
    return written


def text(seed: int, pages: int) -> str:
    """Pages of 8 to 16 lines, an empty line between them."""
    rng = random.Random(seed)
    return "\n\n".join("\n".join(page(rng, rng.randint(8, 16))) for _ in range(pages)) + "\n"


def prompts(seed: int, count: int) -> list[str]:
    """Beginnings of pages: two to four lines, so that the page's step is known."""
    rng = random.Random(seed)
    return ["\n".join(page(rng, rng.randint(2, 4))) + "\n" for _ in range(count)]
