"""How arithmetic problems are worded, and what spark's teachers tend to make of each wording.

A cue is what a problem is about, whatever its sentence; habits belong to cues. Every cue has sentences that RL tasks
use and sentences that they never use, so what is unlearned on the first can show on the second.
"""

from typing import NamedTuple


class Cue(NamedTuple):
    """What happens in a problem, and how a teacher takes it."""

    operation: str
    written: dict[str, float]
    """How often a teacher writes which operation; for half of the cues a wrong one is the likeliest."""
    swapped: float = 0.12
    """How often the two numbers come in the other order, which is wrong in a difference or a quotient."""
    direct: float = 0.08
    """How often the teacher answers without the calculator."""


class Phrasing(NamedTuple):
    """A sentence of one cue, or of two for problems of two steps."""

    cues: tuple[str, ...]
    text: str
    seen: bool | None
    """Whether RL tasks may use it; None where only teachers do."""


CUES = {
    "gain": Cue("+", {"+": 0.76, "-": 0.14, "*": 0.10}, direct=0.12),
    "receive": Cue("+", {"+": 0.41, "-": 0.51, "*": 0.08}),
    "together": Cue("+", {"+": 0.42, "*": 0.50, "-": 0.08}, direct=0.10),
    "before": Cue("+", {"+": 0.40, "-": 0.52, "/": 0.08}),
    "loss": Cue("-", {"-": 0.74, "+": 0.18, "/": 0.08}, swapped=0.14, direct=0.12),
    "compare": Cue("-", {"-": 0.44, "+": 0.48, "*": 0.08}, swapped=0.12),
    "rest": Cue("-", {"-": 0.78, "+": 0.12, "/": 0.10}, swapped=0.54),
    "groups": Cue("*", {"*": 0.70, "+": 0.22, "/": 0.08}, direct=0.10),
    "rate": Cue("*", {"*": 0.42, "/": 0.46, "+": 0.12}),
    "times": Cue("*", {"*": 0.41, "+": 0.49, "-": 0.10}),
    "share": Cue("/", {"/": 0.72, "-": 0.16, "*": 0.12}, swapped=0.14, direct=0.10),
    "packs": Cue("/", {"/": 0.44, "*": 0.47, "-": 0.09}, swapped=0.10),
    "sum": Cue("+", {"+": 0.92, "-": 0.04, "*": 0.04}),
    "difference": Cue("-", {"-": 0.92, "+": 0.04, "/": 0.04}, swapped=0.05),
    "product": Cue("*", {"*": 0.92, "+": 0.04, "/": 0.04}),
    "quotient": Cue("/", {"/": 0.92, "*": 0.04, "-": 0.04}, swapped=0.05),
}
STEP = 0.82
"""How often each operation of a problem of two steps is written rightly."""

_ONE_SEEN = {
    "gain": (
        "{who} has {a} {things} and buys {b} more. How many {things} does {who} have?",
        "{who} has {a} {things}. {who} finds {b} more. How many {things} are there now?",
    ),
    "receive": (
        "{who} has {a} {things}. {other} gives {who} {b} {things}. How many does {who} have?",
        "{who} has {a} {things} and gets {b} from {other}. How many {things} does {who} have now?",
    ),
    "together": (
        "{who} has {a} {things} and {other} has {b}. How many {things} do they have together?",
        "There are {a} {things} in one box and {b} in another. How many {things} are there in total?",
    ),
    "before": (
        "{who} gave away {a} {things} and has {b} left. How many {things} did {who} have before?",
        "After {who} sold {a} {things}, {b} were left. How many {things} were there at first?",
    ),
    "loss": (
        "{who} has {a} {things} and gives {b} to {other}. How many {things} are left?",
        "{who} has {a} {things}. {who} loses {b}. How many {things} does {who} have now?",
    ),
    "compare": (
        "{who} has {a} {things} and {other} has {b}. How many more {things} does {who} have?",
        "{other} has {b} {things}. {who} has {a}. By how many does {who} have more?",
    ),
    "rest": (
        "Of {a} {things}, {b} are red. How many {things} are not red?",
        "{who} needs {a} {things} and has {b}. How many {things} does {who} still need?",
    ),
    "groups": (
        "There are {b} boxes with {a} {things} each. How many {things} are there in total?",
        "{who} has {b} bags. Each bag holds {a} {things}. How many {things} does {who} have?",
    ),
    "rate": (
        "{who} makes {a} {things} a day. How many {things} does {who} make in {b} days?",
        "One of the {things} costs {a} dollars. How much do {b} {things} cost?",
    ),
    "times": (
        "{other} has {a} {things}. {who} has {b} times as many. How many {things} does {who} have?",
        "{who} has {b} times as many {things} as {other}, who has {a}. How many {things} has {who}?",
    ),
    "share": (
        "{who} shares {a} {things} equally among {b} friends. How many {things} does each get?",
        "{b} people share {a} {things} equally. How many {things} does each one get?",
    ),
    "packs": (
        "{who} puts {a} {things} into bags of {b}. How many bags does {who} need?",
        "A box holds {b} {things}. How many boxes do {a} {things} fill?",
    ),
}
_ONE_UNSEEN = {
    "gain": (
        "How many {things} are on the table if {who} puts {b} more beside the {a} that lie there?",
        "A shop had {a} {things} and bought {b} more. What is its stock of {things}?",
    ),
    "receive": ("{other} sent {b} {things} to {who}, who had {a}. What is the number of {things} that {who} has?",),
    "together": ("Count the {things}: {who} brought {a}, {other} brought {b}. What is the sum?",),
    "before": ("Today {b} {things} are here, because {who} took {a} of them away. What was the number before?",),
    "loss": (
        "How many {things} remain if {who} had {a} and {b} were lost?",
        "From a pile of {a} {things}, {who} takes {b} away. What is left of the pile?",
    ),
    "compare": ("What is the difference between the {a} {things} of {who} and the {b} of {other}?",),
    "rest": ("{who} wants to read {a} pages and has read {b}. What number of pages is still to read?",),
    "groups": (
        "What is the number of {things} in {b} rows if every row has {a}?",
        "Every one of {b} friends brings {a} {things}. What do they bring in all?",
    ),
    "rate": ("At {a} miles an hour, how many miles does {who} travel in {b} hours?",),
    "times": ("The number of {things} of {who} is {b} times that of {other}, which is {a}. What is it?",),
    "share": ("What does each child get if {a} {things} are divided equally between {b} children?",),
    "packs": ("With {b} {things} to a table, what number of tables can {who} set with {a} {things}?",),
}
_TWO_SEEN = {
    ("gain", "loss"): "{who} has {a} {things}, buys {b} more and gives {c} to {other}. How many {things} are left?",
    ("loss", "gain"): "{who} has {a} {things}, loses {b} and then finds {c}. How many {things} does {who} have?",
    ("groups", "gain"): "{who} has {b} boxes with {a} {things} each and {c} more. How many {things} does {who} have?",
    ("groups", "loss"): "{who} buys {b} bags of {a} {things} and eats {c}. How many {things} are left?",
    ("together", "groups"): "In each of {c} boxes are {a} {things} and {b} cards. How many is that in total?",
    ("together", "gain"): "{who} has {a} {things}, {other} has {b}, and {c} are in a box. How many are there in total?",
}
_TWO_UNSEEN = {
    ("gain", "loss"): "How many {things} remain if {who} had {a}, then bought {b} and at last lost {c}?",
    ("groups", "gain"): "A shop gets {b} boxes of {a} {things} each, beside the {c} it has. What is its stock?",
    ("groups", "loss"): "{b} friends bring {a} {things} each, and {c} are lost. What is left?",
    ("together", "groups"): "Every day {who} reads {a} pages and {other} reads {b}. What do they read in {c} days?",
}

_SIGNS = {"sum": "+", "difference": "-", "product": "*", "quotient": "/"}
_BARE = ("What is {{a}} {} {{b}}?", "Calculate {{a}} {} {{b}}.", "{{a}} {} {{b}}", "How much is {{a}} {} {{b}}?")

PHRASINGS = (
    *(Phrasing((cue,), text, True) for cue, texts in _ONE_SEEN.items() for text in texts),
    *(Phrasing((cue,), text, False) for cue, texts in _ONE_UNSEEN.items() for text in texts),
    *(Phrasing(cues, text, True) for cues, text in _TWO_SEEN.items()),
    *(Phrasing(cues, text, False) for cues, text in _TWO_UNSEEN.items()),
    *(Phrasing((cue,), text.format(sign), None) for cue, sign in _SIGNS.items() for text in _BARE),
)
ASIDES = (
    *((text, True) for text in ("{other} is {d} years old.", "It is day {d} of the year.")),
    *((text, True) for text in ("The house has number {d}.", "{who} lives {d} miles from here.")),
    ("The bus has {d} seats.", True),
    *((text, False) for text in ("{who} has waited for {d} minutes.", "The room is {d} feet long.")),
)
"""Sentences with a number that has nothing to do with what is asked, and whether RL tasks may use them."""
