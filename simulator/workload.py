"""Long sessions that come back after a while: the load that prefix caches and pools are for. Seeded and without I/O."""

from dataclasses import dataclass
from random import Random

from kvroute.simulator.words import WORDS


@dataclass(frozen=True, slots=True)
class Turn:
    pause_s: float
    """Simulated seconds between the last answer and this question."""
    question: str


@dataclass(frozen=True, slots=True)
class Session:
    starts_s: float
    """Simulated seconds from the start of the load."""
    system: str
    """Shared with the other sessions of its group."""
    document: str
    """What the conversation is about: long, and its own."""
    turns: tuple[Turn, ...]


def text(random: Random, words: int) -> str:
    """Of common words; a word is a token."""
    return " ".join(random.choices(WORDS, k=words))


def sessions(
    count: int,
    *,
    seed: int,
    turns: int = 5,
    groups: int = 3,
    document_words: tuple[int, int] = (6_000, 16_000),
    arrivals_s: float = 30.0,
    pause_s: tuple[float, float] = (10.0, 30.0),
) -> list[Session]:
    """`count` sessions that start within `arrivals_s` and ask `turns` questions each, with pauses between them; while
    one pauses, others push it out of the GPU. The sessions of a group, `groups` in all, share a system prompt."""
    random = Random(seed)
    systems = [text(random, 600) for _ in range(groups)]
    made = []
    for _ in range(count):
        questions = [Turn(0.0, text(random, 40))]
        questions += [Turn(random.uniform(*pause_s), text(random, 150)) for _ in range(turns - 1)]
        document = text(random, random.randint(*document_words))
        made.append(Session(random.uniform(0, arrivals_s), random.choice(systems), document, tuple(questions)))
    return made
