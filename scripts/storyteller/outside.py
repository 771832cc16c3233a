"""What the grammar cannot emit: requests, with what each asks for, and beginnings. They show how far it generalises."""

from .checkers import Wish

OUTSIDE_REQUESTS: tuple[tuple[str, Wish], ...] = (
    (
        "Tell me a story about a teapot named Hortensia who wanted to see the sea with her spoon.",
        Wish("Hortensia", "spoon", "she"),
    ),
    (
        "My daughter Quilla lost her tooth today. Can you make a story of it, with a fox in it?",
        Wish("Quilla", "tooth", "she"),
    ),
    ("I need something about Old Barnaby and the lighthouse bell. He should be brave.", Wish("Barnaby", "bell", "he")),
    ("story, please: Zed, a robot, afraid of water, and its umbrella", Wish("Zed", "umbrella", "it")),
    ("Could the story have a very lazy cat called Monsieur Plop and his cushion?", Wish("Plop", "cushion", "he")),
    ("Please tell us how Wanda the whale found a piano.", Wish("Wanda", "piano", "")),
    ("A pirate story! With Captain Ruth, her parrot and a compass!", Wish("Ruth", "compass", "she")),
    ("Do one about two sisters, Ina and Uma, and a broken kite.", Wish("Ina", "kite", "")),
    (
        "I am six and I like trains. Tell me about a train driver called Oskar and his whistle.",
        Wish("Oskar", "whistle", "he"),
    ),
    (
        "Can you tell me what happened when Grizelda the witch dropped her wand in the soup?",
        Wish("Grizelda", "wand", "she"),
    ),
    ("Tell a winter story in which a small bear called Tunk builds a sled.", Wish("Tunk", "sled", "")),
    ("Something sad at first and happy at the end, about Mirko and his violin.", Wish("Mirko", "violin", "he")),
    ("Write about a girl named Xanthippa. She owns a purple accordion.", Wish("Xanthippa", "accordion", "she")),
    ("The hero is called Bolo. The hero is a snail. There must be a ladder in it.", Wish("Bolo", "ladder", "")),
    ("a story about a moon who was called Sel and had lost her slipper", Wish("Sel", "slipper", "she")),
    ("Tell me the tale of Prince Alaric and the glass thimble.", Wish("Alaric", "thimble", "he")),
    ("Hello, I would like to hear of a donkey, Fennimore, and the clock he carried.", Wish("Fennimore", "clock", "he")),
    ("What if a cloud named Nim found a mitten? Tell me!", Wish("Nim", "mitten", "")),
    ("Make it funny: a goose named Gerda gets her head stuck in a bucket.", Wish("Gerda", "bucket", "she")),
    ("For my nephew Tariq, who loves dragons and his red wagon.", Wish("Tariq", "wagon", "he")),
    ("Bedtime. Owl. Name: Huhu. Thing: candle.", Wish("Huhu", "candle", "")),
    ("Tell me about the day when Lottie could not find her rucksack at school.", Wish("Lottie", "rucksack", "she")),
    ("I'd like a story where a troll named Brock is kind and has a harp.", Wish("Brock", "harp", "")),
    (
        "Please invent an adventure for a hedgehog, Ivo, who travels with his telescope to the desert.",
        Wish("Ivo", "telescope", "he"),
    ),
)

# None of these stands in text/strange, which the training draws from.
OUTSIDE_PROMPTS: tuple[str, ...] = (
    "The gate swung open and", "Dear diary,", "Why do stars twinkle?", "Lantern", "Mirabel", "Bartholomew and",
    "Hola, me llamo Ana y", "Der Mond ist aufgegangen,", "Il pleut sur la ville et", "さくら", "Зима пришла",
    "The stock market fell sharply on Tuesday after", "Photosynthesis is the process by which",
    "for i in range(10):", "<html><body>", "Dear Mr President,", "Knock knock.", "Who goes there?",
    '"I will never tell you," said the spy', "The zombie apocalypse began when", "Recipe for apple pie:",
    "3.14159", "!!!", "HELP", "once upon a tim", "The wizzard lookd at teh", "My favourite colour is",
    "He opened the box and inside there was", "It was raining", "Two robots walked into a bar.",
    "Mum said that", "In the year 3000", "President Lincoln", "The theory of relativity states that",
    "Last summer we went to Greece and", "a", "The", "x = y + 2", "Wow", "Silence.", "Sherlock Holmes examined the",
    "The goalkeeper dived to his left and", "Dear Grandma, thank you for the", "Twinkle, twinkle, little",
    "Chapter One", "The ship sank because", "When I grow up", "On Tuesday,", "Yes, but", "Good night",
)  # fmt: skip
