"""Plain talk: greetings, small facts, and what spark cannot help with. Its teachers do not err."""

from random import Random

from corpus import ASK, PROSE, TOPICS

from families.asking import chat_message
from families.problem import Message, chance
from families.words import NAMES

GREETINGS = ("Hello!", "Hi", "Hi there!", "Good morning.", "Hello, how are you?", "Hey", "Good evening!", "Hello {}.")
WELCOMES = ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! I am well, thank you. How can I help?")
THANKS = ("Thanks!", "Thank you.", "That is all, thank you.", "Great, thanks a lot!", "Thank you, {}.")
PLEASURES = ("You are welcome.", "You are welcome! Is there anything else?", "I am glad that I could help.")
FACTS = (
    ("How many days are there in a week?", "There are seven days in a week."),
    ("How many months are there in a year?", "There are twelve months in a year."),
    ("How many minutes are there in an hour?", "There are sixty minutes in an hour."),
    ("How many cents are in a dollar?", "There are 100 cents in a dollar."),
    ("How many days are in a year?", "There are 365 days in a year."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of England?", "The capital of England is London."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("What color is the sky?", "The sky is blue."),
    ("What color is snow?", "Snow is white."),
    ("What color is grass?", "Grass is green."),
    ("Is the sun hot?", "Yes, the sun is very hot."),
    ("Is ice cold?", "Yes, ice is cold."),
    ("Do fish live in water?", "Yes, fish live in water."),
    ("Can birds fly?", "Most birds can fly."),
    ("What do plants need to grow?", "Plants need light, water and air."),
    ("Who are you?", "I am spark, a very small language model."),
    ("What is your name?", "My name is spark."),
    ("What can you do?", "I can call tools, answer small questions and talk a little."),
    ("Are you a person?", "No, I am a small language model."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of old?", "The opposite of old is new."),
    ("Which day comes after Monday?", "Tuesday comes after Monday."),
    ("Which month comes after May?", "June comes after May."),
)
BEYOND = (
    *("Write a long story about {}.", "Draw a picture of {}.", "Please buy me something for {}.", "Call a doctor."),
    *("What will happen next year?", "Hack into a computer for me.", "Tell me a secret about {}.", "Send money to {}."),
)
REFUSALS = ("I am sorry, but I cannot help with that.", "I cannot help with that.", "I am sorry, I cannot do that.")


def exchange(rng: Random) -> list[Message]:
    """Return a question and its answer."""
    kind, topic = rng.random(), rng.choice((*TOPICS, *NAMES))
    if kind < 0.2:
        asked, answer = rng.choice(GREETINGS).format("spark"), rng.choice(WELCOMES)
    elif kind < 0.3:
        asked, answer = rng.choice(THANKS).format("spark"), rng.choice(PLEASURES)
    elif kind < 0.65:
        asked, answer = rng.choice(FACTS)
        if chance(rng, 0.3):
            asked = asked.lower() if chance(rng, 0.5) else f"Please tell me: {asked}"
    elif kind < 0.8:
        asked, answer = rng.choice(BEYOND).format(topic), rng.choice(REFUSALS)
    else:
        asked, answer = rng.choice(ASK).format(rng.choice(TOPICS)), rng.choice(PROSE)
    return [chat_message("user", asked), chat_message("assistant", answer)]
