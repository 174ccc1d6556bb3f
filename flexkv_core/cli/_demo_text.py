"""What the demonstration asks: a prompt of five tokens, a document of about three thousand, shorter ones."""

from __future__ import annotations

SHORT_PROMPT = "The capital of France is"
SHORT_ANSWER = "Paris"
DOCUMENT_ANSWER = "Rowan"
WARM_UP = "Hello there, how are you today"

_KEEPERS = ("Anna", "Bo", "Carla", "Davit", "Elin", "Farid", "Greta")
_WEATHER = (
    "fog until noon, then a clear sky and little wind",
    "a gale out of the north-west with rain all day",
    "calm, and so clear that the far islands could be counted",
    "snow in the morning, which melted before the evening",
)
_WORK = (
    "cleaned the lens and trimmed the spare lamp",
    "painted the door of the boat house green",
    "mended the rope of the flag and wound the clock",
    "carried forty litres of oil up the stairs",
    "wrote to the harbour master about the broken step",
)
_SHIPS = ("a schooner with timber", "two fishing boats", "the mail steamer", "no ship at all", "a grey tug")


def document(num_entries: int, title: str = f"Log of the lighthouse at Cape {DOCUMENT_ANSWER}") -> str:
    """A lighthouse keeper's log and a sentence that its first line completes; 54 tokens an entry.

    Titles that differ in their first word make documents that share nothing.
    """
    entries = [_entry(day) for day in range(1, num_entries + 1)]
    return f"{title}.\n\n" + "\n".join(entries) + "\n\nThat was the log of the lighthouse at Cape"


def _entry(day: int) -> str:
    """One day; the lists have lengths without a common divisor, so the days differ."""
    return (
        f"Day {day}. {_KEEPERS[day % 7]} had the watch. There was {_WEATHER[day % 4]}. "
        f"Before supper we {_WORK[day % 5]}. We saw {_SHIPS[(day * 3) % 5]} pass at {day % 12 + 1} o'clock."
    )
