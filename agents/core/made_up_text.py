"""Prompts that no engine has cached: random words of three letters.

Most tokenizers have such a word and its space as one token; none has more than one for each of its
four characters.
"""

from random import Random

_TEXT = (
    "act age aim arc arm ask bag ban bay bed bit bow box bus can cap car cow cup cut day dig dog "
    "dry ear egg end eye fan far fat few fit fly fog gap gas gun hat hen hot ice ink jam jar jet "
    "job key lab law leg lid lip log man map mix mud net oil pen pig pin pot red rod row sea sky"
)
WORDS = _TEXT.split()


def made_up_text(dice: Random, words: int) -> str:
    """A text of so many words; another one may follow it."""
    return " ".join(dice.choices(WORDS, k=words)) + " "
