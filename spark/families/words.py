"""The words that problems are made of."""

from random import Random

NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "James", "Karen", "Leo", "Maria"),
    *("Nina", "Omar", "Paula", "Quinn", "Rosa", "Samir", "Tom", "Uma", "Victor", "Wanda", "Yusuf", "Zoe", "Lena"),
)
THINGS = (
    *("apples", "books", "buttons", "coins", "cookies", "eggs", "flowers", "letters", "marbles", "oranges", "pages"),
    *("pencils", "stamps", "stickers", "tickets", "trees", "stones", "shells", "cakes", "balls", "pears", "keys"),
)
CITIES = (
    *("Paris", "London", "Berlin", "Tokyo", "Rome", "Madrid", "Oslo", "Cairo", "Lima", "Delhi", "Dublin", "Vienna"),
    *("Prague", "Athens", "Lisbon", "Boston", "Toronto", "Nairobi", "Sydney", "Seoul", "Quito", "Tunis", "Riga"),
    *("Geneva", "Turin", "Porto", "Leeds", "Bergen", "Kyoto", "Havana", "Dakar", "Zagreb", "Malmo", "Basel"),
)
JOBS = (
    *("doctor", "teacher", "painter", "farmer", "singer", "writer", "baker", "pilot", "lawyer", "nurse", "driver"),
    *("cook", "chemist", "judge", "sailor", "tailor", "builder", "dancer", "miner", "editor", "banker", "gardener"),
)
PRODUCTS = (
    *("paper", "glass", "bread", "shoes", "lamps", "clocks", "boats", "chairs", "cheese", "bicycles", "paint"),
    *("soap", "toys", "tea", "carpets", "pianos", "maps", "ropes", "candles", "engines", "hats", "tables"),
)
_BEGIN = (
    *("Bar", "Cor", "Den", "Fal", "Gar", "Hol", "Jan", "Kel"),
    *("Lor", "Mar", "Nor", "Pel", "Ros", "Sel", "Tar", "Vin"),
)
_END = ("den", "vik", "lo", "mann", "ton", "sky", "ley", "berg", "dal", "ner", "well", "ford", "rick", "mond", "stad")


def surname(rng: Random) -> str:
    """Return a family name, of 240."""
    return rng.choice(_BEGIN) + rng.choice(_END)


def person(rng: Random) -> str:
    """Return a full name."""
    return f"{rng.choice(NAMES)} {surname(rng)}"


def title(rng: Random) -> str:
    """Return a book's title."""
    first = rng.choice(("Silent", "Golden", "Lost", "Broken", "Distant", "Empty", "Hidden", "Last", "Red", "Cold"))
    second = ("River", "Garden", "Island", "Mountain", "Winter", "Letter", "Bridge", "Voice", "Station", "Harbor")
    return f"{first} {rng.choice(second)}"


def company(rng: Random) -> str:
    """Return a company's name."""
    return f"{surname(rng)} {rng.choice(('Works', 'Brothers', 'Trading', 'Company', 'House'))}"
