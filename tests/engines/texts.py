"""Text for a model with real weights: paragraphs, and questions that each of them answers."""

from __future__ import annotations

TEXTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "The ferry to Holm leaves the harbour at seven in the morning and takes forty minutes. It carries twelve "
        "cars, two buses and about two hundred passengers. In winter, when the wind is strong, the captain waits "
        "until noon. Most passengers are children who go to school on the mainland, and farmers who sell milk and "
        "cheese at the market. The ferry is painted green, because the first owner, a woman called Marta Lind, "
        "thought that a green ship was easier to see in fog. She was wrong about that, but nobody has changed the "
        "colour since.",
        (
            ("What colour is the ferry?", "green"),
            ("How long does the ferry take?", "forty minutes"),
            ("Who was the first owner of the ferry?", "Marta Lind"),
        ),
    ),
    (
        "Oskar repairs clocks in a small shop behind the railway station. He learned the trade from his "
        "grandmother, who had repaired watches for the railway company. The oldest clock in the shop was made in "
        "Prague in 1780 and still runs, though it loses two minutes a day. People ask him why he does not sell it. "
        "He answers that a clock which is wrong by a known amount is more useful than one which is right by "
        "chance. On Fridays he closes the shop at three and plays chess with the baker.",
        (
            ("Where was the oldest clock made?", "Prague"),
            ("What does Oskar repair?", "clocks"),
            ("With whom does Oskar play chess?", "baker"),
        ),
    ),
    (
        "Rice is grown in fields that are flooded with water. The water keeps weeds away and protects young plants "
        "from cold nights. Farmers first grow the seedlings close together in a small bed, and after thirty days "
        "they set them out in the field by hand or with a machine. About a hundred days later the water is let "
        "out, the soil dries, and the rice is cut. Ducks are sometimes kept in the fields. They eat insects and "
        "snails, and they stir the mud with their feet, which lets air reach the roots.",
        (
            ("Which birds are kept in the fields?", "ducks"),
            ("What keeps weeds away?", "water"),
            ("After how many days are the seedlings set out?", "thirty"),
        ),
    ),
    (
        "The library of the village has four rooms. The first has newspapers and a stove, the second has novels, "
        "the third has books for children, and the fourth is locked. Visitors tell each other stories about the "
        "fourth room. One says that it holds a map of a silver mine, another that it holds the letters of a poet. "
        "The librarian, Mister Bauer, knows that it holds brooms, a ladder and eleven broken chairs. He has never "
        "said so, because since the stories began the number of visitors has doubled.",
        (
            ("What is the name of the librarian?", "Bauer"),
            ("How many rooms does the library have?", "four"),
            ("How many broken chairs are in the fourth room?", "eleven"),
        ),
    ),
    (
        "Salt was once so valuable that towns grew rich from it. Water from salty springs was boiled in large iron "
        "pans over wood fires until only white crystals were left. A single pan needed the wood of a small forest "
        "each year, and the hills around the springs became bare. Later, miners found salt deep under the ground "
        "and brought it up in blocks. Merchants carried it on mules across the mountains, where cheese makers and "
        "fishermen waited for it. Today most of that salt is spread on roads in winter.",
        (
            ("Which animals carried the salt?", "mules"),
            ("What were the pans made of?", "iron"),
            ("Where is most of that salt spread today?", "roads"),
        ),
    ),
    (
        "Bees tell each other where flowers are by dancing. A bee that has found food returns to the hive and "
        "walks in a straight line while it shakes its body. The direction of the line shows the direction of the "
        "flowers, measured from the sun, and the length of the walk shows how far they are. The other bees follow "
        "it in the dark and feel the dance with their antennae. A scientist named Karl von Frisch worked this out "
        "by painting small dots on bees and watching them for many years. He was given the Nobel Prize in 1973.",
        (
            ("How do bees tell each other where flowers are?", "danc"),
            ("Who worked this out?", "Frisch"),
            ("In which year was he given the Nobel Prize?", "1973"),
        ),
    ),
    (
        "The bridge over the river Senn was built by soldiers in nine days. It was meant to last one summer, and "
        "it has now stood for sixty years. Its beams are of oak from the forest above the village, and its nails "
        "were made by the smith from old rails. Every spring, when the snow melts, the water rises to the deck, "
        "and people stand on the bank and bet on whether it will hold. The mayor, Anna Reuter, has asked for a "
        "bridge of steel. The council answered that it would pay for one as soon as the old one falls.",
        (
            ("Who is the mayor?", "Anna Reuter"),
            ("Of which wood are the beams?", "oak"),
            ("What is the name of the river?", "Senn"),
        ),
    ),
    (
        "A sailor who wants to know the time at sea can look at the stars, but only if the night is clear. In the "
        "eighteenth century a carpenter named John Harrison built a clock that kept time on a moving ship. It had "
        "no pendulum. Two bars with springs between them swung against each other, so that the rolling of the ship "
        "did not disturb them. His fourth clock was as small as a large watch, and on a voyage to Jamaica it lost "
        "only five seconds. The prize that had been promised to him was twenty thousand pounds, and he had to ask "
        "the king to get it.",
        (
            ("Who built the clock?", "Harrison"),
            ("What was the trade of the man who built the clock?", "carpenter"),
            ("Where did the voyage go?", "Jamaica"),
        ),
    ),
)


def questions() -> list[tuple[str, str]]:
    """Prompts that end where an answer begins, and what the answer has to have in it."""
    return [(f"{text}\n\nQuestion: {question}\nAnswer:", answer) for text, asked in TEXTS for question, answer in asked]
